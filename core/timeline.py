"""Timeline: when one request passed each station. The differences of neighbouring stamps add up to TTFT exactly."""

import time
from enum import StrEnum
from itertools import pairwise

import msgspec


class Station(StrEnum):
    """Stations in the order a request passes them up to its first token."""

    RECEIVED = "received"  # gateway: the HTTP body is in
    TOKENISED = "tokenised"  # gateway: prompt ids are known
    DISPATCHED = "dispatched"  # gateway: sent to its workers
    PREFILL_ARRIVED = "prefill_arrived"  # the worker that computes the prompt has it
    PREFILL_STARTED = "prefill_started"  # its first chunk is planned
    PREFILL_COMPUTED = "prefill_computed"  # its last chunk is computed
    HANDED_OVER = "handed_over"  # decode has all KV and the hidden state (equals PREFILL_COMPUTED when local)
    FIRST_TOKEN = "first_token"  # decode has sampled it
    FIRST_CHUNK = "first_chunk"  # gateway: about to be written to the client


class Timeline(msgspec.Struct, frozen=True):
    """Stamps in nanoseconds of the host's monotonic clock (one clock for all processes of a host).

    `copy_ns` is the time both sides spent copying and checking pieces, `message_ns` from the commit's sending to its
    arrival without copies made meanwhile; both lie inside the stamps and are shown beside them.
    """

    stamps: dict[Station, int] = {}
    copy_ns: int = 0
    message_ns: int = 0

    def stamped(self, station: Station, at_ns: int | None = None) -> "Timeline":
        """This timeline with one more stamp (now, unless given)."""
        stamp = time.monotonic_ns() if at_ns is None else at_ns
        return msgspec.structs.replace(self, stamps={**self.stamps, station: stamp})

    def merged(self, other: "Timeline") -> "Timeline":
        """Both sets of stamps; copy and message times add up."""
        return Timeline(
            {**self.stamps, **other.stamps},
            self.copy_ns + other.copy_ns,
            self.message_ns + other.message_ns,
        )

    def stages(self) -> list[tuple[Station, Station, int]]:
        """(from, to, nanoseconds) for each pair of neighbouring stations that were stamped."""
        present = [s for s in Station if s in self.stamps]
        return [(a, b, self.stamps[b] - self.stamps[a]) for a, b in pairwise(present)]
