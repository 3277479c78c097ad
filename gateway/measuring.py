"""Measuring: what the router wants to know of the requests that have been, from their first tokens and ends. Pure."""

from .ways import Measured

_TRANSFER_TOKENS = 100_000  # that the mean time of handing over is taken over
_LEAST_OVERHEAD_S = 1e-4
_STEP = 1.05  # by which the overhead follows each error: it comes to rest where half of them are positive
_ANSWERS = 256  # that their mean length is taken over


class Measuring:
    """Short hand-overs, which are mostly overhead, count as little as their tokens."""

    def __init__(self, tpot_target_s: float | None) -> None:
        self._tpot_target_s = tpot_target_s
        self._tokens = 0.0
        self._seconds = 0.0
        self._answer_tokens = 0.0
        self._num_answers = 0
        self._overhead_s = _LEAST_OVERHEAD_S

    @property
    def measured(self) -> Measured:
        """So far."""
        transfer_s = self._seconds / self._tokens if self._tokens else 0.0
        return Measured(transfer_s, self._answer_tokens, self._tpot_target_s, self._overhead_s)

    def handed_over(self, num_tokens: int, seconds: float) -> None:
        """So many tokens took so long to be copied and checked, on both sides together."""
        keep = max(1.0 - num_tokens / _TRANSFER_TOKENS, 0.0)
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds

    def first_token(self, predicted_s: float, measured_s: float) -> None:
        """It has come, so long after the dispatch. The prediction held the overhead of that time.

        Many were sent out before the first of them could teach anything: however many are late, none of them raises the
        overhead above what its own first token took in all.
        """
        if measured_s > predicted_s:
            self._overhead_s = max(self._overhead_s, min(self._overhead_s * _STEP, measured_s))
        else:
            self._overhead_s = max(self._overhead_s / _STEP, _LEAST_OVERHEAD_S)

    def answered(self, num_tokens: int) -> None:
        """An answer of so many tokens has ended."""
        self._num_answers = min(self._num_answers + 1, _ANSWERS)
        self._answer_tokens += (num_tokens - self._answer_tokens) / self._num_answers
