"""TransferRate: how long handing over one token takes, from what requests measured. Pure."""

_MEAN_TOKENS = 100_000  # that the mean is taken over


class TransferRate:
    """The time of the last tokens over their number: short hand-overs, which are mostly overhead, count little."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def token_s(self) -> float:
        """0 until something was handed over."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def saw(self, num_tokens: int, seconds: float) -> None:
        """So many tokens took so long to be copied and checked, on both sides together."""
        keep = max(1.0 - num_tokens / _MEAN_TOKENS, 0.0)
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds
