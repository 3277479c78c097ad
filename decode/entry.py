"""DecodeEntry: what the decode role remembers of one request beside its sequence, and the words it has for it."""

import time
from dataclasses import dataclass

from ..core.latency import time_per_output_token
from ..core.messages import NodeRef, TokenChunk
from ..core.request import Request
from ..core.sequence import Sequence
from ..core.timeline import Station, Timeline
from ..engine.forward_batch import Chunk
from ..engine.sampler import SamplingRow
from .output import finish_reason, suppressed_tokens


@dataclass(eq=False)
class DecodeEntry:
    """One choice of a request. `choice` may change until its first token is launched (see forks.py)."""

    request: Request
    choice: int
    sequence: Sequence
    gateway: NodeRef
    prefill: NodeRef | None
    timeline: Timeline
    num_returned_tokens: int  # of its cached prefix, for the prefill worker
    feedback_slot: int = -1  # where the device keeps its newest token; -1 while it waits
    num_cached_tokens: int | None = None  # None until known; reported with the first chunk
    has_reported: bool = False

    def sampling_row(self) -> SamplingRow:
        """How to sample the next token."""
        sampling, sequence = self.request.sampling, self.sequence
        suppress = suppressed_tokens(sequence.num_output_tokens, sampling)
        return SamplingRow(sampling, self.choice, sequence.num_tokens, suppress, self.feedback_slot)

    def chunk(self, num_tokens: int, *, is_decode: bool) -> Chunk:
        """The next tokens of its sequence. One that is still pending is read on the device, where it was sampled."""
        sequence = self.sequence
        start, stop = sequence.num_launched_tokens, sequence.num_launched_tokens + num_tokens
        is_pending = stop > len(sequence.token_ids)
        return Chunk(
            token_ids=[0] if is_pending else sequence.token_ids[start:stop],
            start=start,
            block_table=sequence.block_table,
            wants_hidden=stop == sequence.num_tokens,
            is_decode=is_decode,
            feedback_slot=self.feedback_slot if is_pending else -1,
        )

    @property
    def has_all_tokens(self) -> bool:
        """Every token the request may have is known or pending: no further step is planned for it."""
        return self.sequence.num_output_tokens >= self.request.sampling.max_tokens

    def take(self, token_id: int) -> TokenChunk:
        """Append the oldest pending token; the message that tells of it, with everything that is told only once."""
        sequence = self.sequence
        index = sequence.num_known_output_tokens
        sequence.append(token_id)
        first, self.has_reported = not self.has_reported, True
        if first:
            self.stamp_once(Station.FIRST_TOKEN)
        return TokenChunk(
            self.request.request_id,
            choice=self.choice,
            index=index,
            token_ids=[token_id],
            finish_reason=finish_reason(token_id, sequence.num_known_output_tokens, self.request.sampling),
            num_cached_tokens=self.num_cached_tokens if first else None,
            timeline=self.timeline if first else None,
        )

    def time_per_output_token(self) -> float | None:
        """Seconds from one token to the next so far, of those sampled here; None for fewer than two."""
        num_tokens = self.sequence.num_known_output_tokens - len(self.request.output_token_ids)
        first_at = self.timeline.stamps[Station.FIRST_TOKEN]
        return time_per_output_token(0.0, (time.monotonic_ns() - first_at) / 1e9, num_tokens)

    def count_cached(self, num_cached_tokens: int) -> None:
        """Remember what was found in a cache when the request first got its blocks; of the prompt only."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = min(num_cached_tokens, self.request.num_prompt_tokens)

    def stamp_once(self, *stations: Station) -> None:
        now = time.monotonic_ns()
        for station in stations:
            if station not in self.timeline.stamps:
                self.timeline = self.timeline.stamped(station, now)
