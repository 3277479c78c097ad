"""What is kept of one request: when it was sent, when each chunk came, what the server counted, what went wrong.

All times are seconds of one monotonic clock, counted from the start of the load.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from ..core.latency import time_per_output_token


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request as its client saw it. `error` is None exactly when the answer was complete and as long as asked.

    `scheduled_s` is when an open loop meant to send it (None: as soon as possible). `chunk_times_s[i]` is when the
    i-th chunk that can hold tokens arrived and `chunk_tokens[i]` how many tokens were in it, None where the server
    does not say. `prompt_tokens`, `cached_tokens` and `output_tokens` are the server's usage.
    """

    session: int
    turn: int
    send_s: float
    scheduled_s: float | None = None
    chunk_times_s: list[float] = []
    chunk_tokens: list[int | None] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    end_s: float | None = None  # when its answer, or its failure, was complete

    @property
    def ttft_s(self) -> float:
        """Time to first token: first chunk minus send. Only for a request that succeeded."""
        return self.chunk_times_s[0] - self.send_s

    @property
    def e2el_s(self) -> float:
        """End-to-end latency: last chunk minus send. Only for a request that succeeded."""
        return self.chunk_times_s[-1] - self.send_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single token, which has no such time."""
        return time_per_output_token(self.ttft_s, self.e2el_s, self.output_tokens)

    @property
    def itls_s(self) -> list[float]:
        """The gaps between chunks: a chunk of several tokens is one arrival."""
        return [later - sooner for sooner, later in pairwise(self.chunk_times_s)]


def failure_counts(records: Sequence[RequestRecord]) -> dict[str, int]:
    """Each different error text and how many requests it befell, the most frequent first."""
    return dict(Counter(record.error for record in records if record.error is not None).most_common())
