"""Length-aware packing: short prompts that fit beside a long one finish now, and delay nobody. Pure.

First come, first served, with chunks that may fill the budget of b tokens, prompt m is complete after

    ceil(P_m / b) steps      P_m = tokens of all prompts up to m

so most leave some of their last step to others: `slack_m = b * ceil(P_m / b) - P_m`. A later prompt that is no longer
than the least slack of those in front of it can be computed before them without moving any of them to a later step.

    b = 8, prompts of 10, 3      in order:  8 | 2 3      packed:  5 3 | 5
                                 the 10 is complete after two steps both times, the 3 after one instead of two
"""

from ..engine.chunk_planning import plan_chunks


def pack_chunks(remaining: list[int], token_budget: int, chunk_size: int) -> list[int]:
    """`plan_chunks` that also completes later prompts where that delays no earlier one by a step.

    With chunks smaller than the budget several prompts share every step already, and this is `plan_chunks`.
    """
    plan = plan_chunks(remaining, token_budget, chunk_size)
    cut = next((i for i, (left, tokens) in enumerate(zip(remaining, plan, strict=True)) if tokens < left), None)
    if cut is None or chunk_size < token_budget or token_budget <= 0:
        return plan
    ahead = sum(remaining[: cut + 1])
    room = min(plan[cut], -ahead % token_budget)
    for index in range(cut + 1, len(remaining)):
        if room == 0:
            break
        tokens = remaining[index]
        if tokens <= room:
            plan[index] = tokens
            plan[cut] -= tokens
            room -= tokens
        ahead += tokens
        if not plan[index]:
            room = min(room, -ahead % token_budget)
    return plan
