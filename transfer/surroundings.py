"""LinkSurroundings: what sending and receiving share."""

import logging
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from ..core.config import TransferConfig
from ..core.errors import ConfigurationError
from ..core.layout import BlockLayout
from ..core.messages import Message, NodeRef
from .backends.ring_backend import PieceBuffer
from .held_messages import HeldMessages
from .link_types import MessageChannels, PieceStore
from .rings import MAX_RING_BYTES, MAX_RING_SLOTS, MAX_SLOT_BYTES, RingMaker
from .wire import PeerUnreachable

logger = logging.getLogger(__name__)


@dataclass
class LinkTotals:
    """Running totals of both directions."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_refused: int = 0
    messages_unsent: int = 0


@dataclass(frozen=True)
class LinkSurroundings:
    """Raises ConfigurationError when a ring slot cannot hold one layer of one token, or a ring would be too big."""

    channels: MessageChannels
    store: PieceStore
    layout: BlockLayout
    config: TransferConfig
    rings: RingMaker
    totals: LinkTotals
    held: HeldMessages

    def __post_init__(self) -> None:
        least, slot, num_slots = self.layout.piece_bytes(1, 1), self.config.slot_bytes, self.config.ring_slots
        if not least <= slot <= MAX_SLOT_BYTES:
            raise ConfigurationError(
                f"a ring slot of {slot} bytes must hold one layer of one token ({least} bytes) and fit a message "
                f"({MAX_SLOT_BYTES} bytes); change slot_bytes"
            )
        if not 1 <= num_slots <= MAX_RING_SLOTS or num_slots * slot > MAX_RING_BYTES:
            raise ConfigurationError(
                f"a ring of {num_slots} slots of {slot} bytes; from 1 to {MAX_RING_SLOTS} slots and at most "
                f"{MAX_RING_BYTES} bytes are possible"
            )

    def tell(self, peer: NodeRef, body: Message) -> None:
        """Say something the peer can do without: when it does not hear it, its lease ends the same thing later."""
        try:
            self.channels.send(peer, body)
        except PeerUnreachable as error:
            self.totals.messages_unsent += 1
            logger.debug("%s was not sent: %s", type(body).__name__, error)

    def checksum(self, piece: PieceBuffer) -> int:
        """Of bytes in host memory xxh3_64, of those on a device what the pool computes there."""
        return xxh3_64_intdigest(piece) if isinstance(piece, memoryview) else self.store.checksum(piece)
