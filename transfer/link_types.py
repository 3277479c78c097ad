"""What KVLink needs from its surroundings and what it tells its roles."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..core.config import TransferConfig
from ..core.errors import ConfigurationError
from ..core.layout import BlockLayout
from ..core.messages import MAX_FRAME_BYTES, KVCommit, Message, NodeRef, WorkerInfo
from ..core.timeline import Timeline
from .held_messages import HeldMessages
from .wire import PeerUnreachable

logger = logging.getLogger(__name__)

MAX_RING_SLOTS = 1024


class PieceStore(Protocol):
    """The KV cache pool, as far as transfer knows it; core/layout.py says what a piece is."""

    def gather(self, block_table: Sequence[int], start: int, stop: int, out: memoryview) -> int:
        """Write the piece of the tokens `[start, stop)` to `out`; returns its size in bytes."""

    def scatter(self, block_table: Sequence[int], start: int, stop: int, piece: memoryview) -> None:
        """Write a piece to the slots of the tokens `[start, stop)` and to nothing else."""


class MessageChannels(Protocol):
    """WorkerChannels, as far as KVLink knows it; both raise PeerUnreachable."""

    def send(self, to: NodeRef, body: Message, payload: bytearray | None = None) -> None: ...

    def peer_info(self, ref: NodeRef) -> WorkerInfo: ...


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


@dataclass
class LinkTotals:
    """Running totals of both directions."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_refused: int = 0
    messages_unsent: int = 0


@dataclass(frozen=True)
class LinkSurroundings:
    """What both directions share. Raises ConfigurationError when a ring slot cannot hold one token."""

    channels: MessageChannels
    store: PieceStore
    layout: BlockLayout
    config: TransferConfig
    run_dir: str
    me: WorkerInfo
    totals: LinkTotals
    held: HeldMessages

    def tell(self, peer: NodeRef, body: Message) -> None:
        """Say something the peer can do without: when it does not hear it, its lease ends the same thing later."""
        try:
            self.channels.send(peer, body)
        except PeerUnreachable as error:
            self.totals.messages_unsent += 1
            logger.debug("%s was not sent: %s", type(body).__name__, error)

    def __post_init__(self) -> None:
        per_token, slot = self.layout.bytes_per_token, self.config.slot_bytes
        if not per_token <= slot <= MAX_FRAME_BYTES:
            raise ConfigurationError(
                f"a ring slot of {slot} bytes must hold one token ({per_token} bytes) and fit a message "
                f"({MAX_FRAME_BYTES} bytes); change slot_bytes"
            )
        if not 1 <= self.config.ring_slots <= MAX_RING_SLOTS:
            raise ConfigurationError(f"ring_slots {self.config.ring_slots} is not between 1 and {MAX_RING_SLOTS}")
