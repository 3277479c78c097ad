"""TokenCounts: which tokens have occurred in one sequence, and how often in its output. What penalties read."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_INITIAL_ROOM = 64


class TokenCounts:
    """One entry for each different token, in the order of their first occurrence; a new token costs the same however
    long the sequence is.
    """

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]):
        unique = list(dict.fromkeys(prompt_token_ids))
        self._place = {token_id: place for place, token_id in enumerate(unique)}
        self._ids = np.array([*unique, *[0] * _INITIAL_ROOM], np.int64)
        self._counts = np.zeros(len(self._ids), np.int64)
        for token_id in output_token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """The output has one token more."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids, self._counts = (np.concatenate((a, np.zeros_like(a))) for a in (self._ids, self._counts))
        self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """`[n]` different ids; like `counts` a view, valid until the next `add`."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """`[n]`: how often each of them is in the output; 0: in the prompt alone."""
        return self._counts[: len(self._place)]
