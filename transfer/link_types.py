"""What KVLink needs from its surroundings and what it tells its roles."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..core.messages import KVCommit, Message, NodeRef, WorkerInfo
from ..core.timeline import Timeline
from .backends.ring_backend import DeviceBuffer, PieceBuffer


class PieceStore(Protocol):
    """The KV cache pool, as far as transfer knows it; core/layout.py says what a piece is."""

    def gather(
        self, block_table: Sequence[int], start: int, stop: int, out: PieceBuffer, *, first_layer: int, last_layer: int
    ) -> int:
        """Write the piece of the tokens `[start, stop)` in those layers to `out`; returns its size in bytes."""

    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        piece: PieceBuffer,
        *,
        first_layer: int,
        last_layer: int,
    ) -> None:
        """Write a piece to the slots of the tokens `[start, stop)` in those layers and to nothing else."""

    def checksum(self, piece: DeviceBuffer) -> int:
        """Of bytes on a device, computed there: equal for equal bytes on any two workers."""


class MessageChannels(Protocol):
    """WorkerChannels, as far as KVLink knows it; the first two raise PeerUnreachable."""

    def send(self, to: NodeRef, body: Message, payload: bytearray | None = None) -> None: ...

    def peer_info(self, ref: NodeRef) -> WorkerInfo: ...

    def wake(self) -> None:
        """From any thread: the loop's `poll` returns soon."""


class HandedOver(NamedTuple):
    """All KV is in the blocks, verified, and the commit is here. `timeline`: the sender's, with both sides' copies."""

    request_id: str
    commit: KVCommit
    timeline: Timeline


class ReceiveFailed(NamedTuple):
    """The hand-over is over; the first `contiguous_tokens` tokens of the prompt are in the blocks, verified."""

    request_id: str
    reason: str
    contiguous_tokens: int


class SendDone(NamedTuple):
    """Every piece has been copied out of the blocks and the commit has left: the blocks are the sender's own again."""

    request_id: str


class SendFailed(NamedTuple):
    """The hand-over is over; the blocks are the sender's own again."""

    request_id: str
    reason: str


LinkEvent = HandedOver | ReceiveFailed | SendDone | SendFailed


class LinkCounts(NamedTuple):
    senders: int
    receivers: int
    ring_slots_in_use: int  # written by this side and not given back
    bytes_sent: int
    bytes_received: int
    messages_refused: int  # late, repeated or wrong ones of peers
    messages_unsent: int  # to peers that cannot be reached; their leases end what waits for them
    staging_bytes: int  # memory of this worker's rings and groups, on whatever device
