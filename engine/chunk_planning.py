"""How many tokens each waiting prompt advances in the next step. Integers only."""


def plan_chunks(remaining: list[int], token_budget: int, chunk_size: int) -> list[int]:
    """Share `token_budget` tokens among prompts with `remaining` tokens left, first come first served.

    A prompt gets at most `chunk_size` tokens a step, so that a long one does not keep the ones behind it waiting;
    what it leaves goes to the next. 0 means that the prompt waits. A budget of 0 or less plans nothing.
    """
    left = max(token_budget, 0)
    plan = []
    for tokens in remaining:
        advance = min(tokens, chunk_size, left)
        plan.append(advance)
        left -= advance
    return plan
