"""StepShare: how much a prefill step may compute on a worker that decodes at the same time. Pure; sim/ drives the same.

A turn of the worker's loop gives each role one step, so what is generated here waits for the prefill step of its turn.
The decode role says with each of its plans how many prompt tokens a turn may hold; what its own prompts leave of them
is the prefill role's.
"""

MIN_SHARE = 4  # the prefill role gets at least 1/4 of the prompt tokens of a turn: neither role starves the other


class StepShare:
    """One per worker. Without decodes a prefill step is as long as the prefill role likes."""

    def __init__(self) -> None:
        self._most: int | None = None

    def planned(self, num_decodes: int, prompt_budget: int, num_prompt_tokens: int) -> None:
        """A step of the decode role: so many decodes, beside which a turn may compute `prompt_budget` prompt tokens,
        and so many that it computes itself.
        """
        rest = max(prompt_budget - num_prompt_tokens, prompt_budget // MIN_SHARE, 1)
        self._most = rest if num_decodes else None

    def limited(self, token_budget: int) -> int:
        """The most tokens of the next prefill step, of the `token_budget` it would have alone."""
        return token_budget if self._most is None else min(token_budget, self._most)
