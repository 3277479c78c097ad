"""StepShare: how much a prefill step may compute on a worker that decodes at the same time. Pure.

A turn of the worker's loop gives each role one step, so what is generated here waits for the prefill step of its turn.
The decode role says before each of its steps how many prompt tokens a turn may hold; what its own prompts leave of
them is the prefill role's.
"""

MIN_SHARE = 4  # the prefill role gets at least 1/4 of the prompt tokens of a turn: neither role starves the other


class StepShare:
    """One per worker. Without decodes a prefill step is as long as the prefill role likes."""

    def __init__(self) -> None:
        self._limit: int | None = None

    def decoding(self, prompt_budget: int, num_own_tokens: int) -> None:
        """It generates; a turn may hold `prompt_budget` prompt tokens, of which the decode role computes so many."""
        self._limit = max(prompt_budget - num_own_tokens, prompt_budget // MIN_SHARE, 1)

    def not_decoding(self) -> None:
        self._limit = None

    def limited(self, token_budget: int) -> int:
        """The most tokens of the next prefill step, of the `token_budget` it would have alone."""
        return token_budget if self._limit is None else min(token_budget, self._limit)
