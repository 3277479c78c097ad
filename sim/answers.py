"""Answers: how long each simulated answer is, and token ids for it. Nothing depends on token values but caching."""

from collections.abc import Sequence

FILLER_TOKEN = 7
_FIRST_TOKENS = 1 << 31  # ids from here on begin answers, ids below belong to prompts (workload.py)


class Answers:
    """A request's seed is its number here: as with counted randomness, the seed decides what the answer is."""

    def __init__(self, lengths: Sequence[int]):
        self._lengths = lengths

    def length(self, seed: int) -> int:
        """Output tokens until the model stops, if `max_tokens` does not stop it before."""
        return self._lengths[seed]

    def token_ids(self, seed: int, start: int, stop: int) -> list[int]:
        """Output tokens `start` up to `stop`. The first one differs from request to request, so no answer is another's
        cached prefix.
        """
        token_ids = [FILLER_TOKEN] * (stop - start)
        if start == 0 < stop:
            token_ids[0] = _FIRST_TOKENS + seed
        return token_ids
