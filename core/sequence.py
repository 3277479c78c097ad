"""Sequence: a worker's running state of one request. Every length is a property."""

from array import array
from collections.abc import Sequence as ReadOnly

from .lifecycle import Event, Phase, advance


class Sequence:
    """Tokens so far, how many of them are computed, and the blocks that hold their KV.

        token_ids                           | pending: sampled on the device, ids not known here yet
        computed | in flight | uncomputed

    A forward pass is launched before the one in front of it is collected, so the newest token may be pending while the
    next pass computes it. Invariant: `num_computed_tokens + num_in_flight_tokens <= num_tokens`, and the blocks have
    room for them. A sequence does not know whether it prefills or decodes: it has uncomputed tokens, and a forward
    pass shrinks their number.
    """

    def __init__(self, request_id: str, namespace: str, token_ids: ReadOnly[int], num_prompt_tokens: int):
        self.request_id = request_id
        self.namespace = namespace
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_pending_tokens = 0
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.max_cached_tokens: int | None = None  # so many may come from a cache; None: all but the last
        self.block_table = array("i")  # logical block index |-> block_id; an array is packed for the device at once
        self.phase = Phase.WAITING

    @property
    def num_tokens(self) -> int:
        """Known and pending ones."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def cache_limit(self) -> int:
        """From here on all is computed, whatever a cache holds: at least the last token, which is sampled from."""
        limit = self.num_tokens - 1
        return limit if self.max_cached_tokens is None else min(limit, self.max_cached_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Known and pending ones."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_known_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_launched_tokens(self) -> int:
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that no forward pass has taken up yet."""
        return self.num_tokens - self.num_launched_tokens

    def launched(self, num_tokens: int) -> None:
        """A forward pass computes the next tokens."""
        self.num_in_flight_tokens += num_tokens
        assert self.num_launched_tokens <= self.num_tokens

    def collected(self, num_tokens: int) -> None:
        """The oldest forward pass in flight is over; the KV of its tokens is in the blocks."""
        self.num_in_flight_tokens -= num_tokens
        self.num_computed_tokens += num_tokens
        assert self.num_in_flight_tokens >= 0

    def expect(self) -> None:
        """The next token is being sampled."""
        self.num_pending_tokens += 1

    def append(self, token_id: int) -> None:
        """The oldest pending token is known."""
        self.num_pending_tokens -= 1
        assert self.num_pending_tokens >= 0
        self.token_ids.append(token_id)

    def on(self, event: Event) -> None:
        """Move along the lifecycle table. Raises LocalProtocolError for a step it does not have."""
        self.phase = advance(self.phase, event)
