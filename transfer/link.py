"""KVLink: all KV hand-overs of one worker, in both directions. The roles talk to this and to nothing below it.

    prefill role -> open_sender, computed..., finish   -> SendDone | SendFailed
    decode role  -> open_receiver                      -> HandedOver | ReceiveFailed
    the loop     -> handle(every message), pump(each turn), drop_peer(a peer that is gone)

After each event the hand-over is forgotten here. No call blocks and none raises for what a peer does.
"""

import logging
from collections.abc import Sequence

from ..core.config import TransferConfig
from ..core.errors import RemoteProtocolError
from ..core.layout import BlockLayout
from ..core.messages import (
    GroupKey,
    KVAbort,
    KVCommit,
    KVCredit,
    KVGrant,
    KVPiece,
    KVProgress,
    NodeRef,
    RingGone,
    RingOffer,
    WorkerInfo,
)
from ..core.timeline import Timeline
from .held_messages import HeldMessages
from .link_types import (
    HandedOver,
    LinkCounts,
    LinkEvent,
    MessageChannels,
    PieceStore,
    ReceiveFailed,
    SendDone,
    SendFailed,
)
from .receiving import Receiving
from .rings import RingMaker
from .sending import Sending
from .surroundings import LinkSurroundings, LinkTotals
from .wire import Incoming

__all__ = [
    "HandedOver",
    "KVLink",
    "LinkCounts",
    "LinkEvent",
    "MessageChannels",
    "PieceStore",
    "ReceiveFailed",
    "SendDone",
    "SendFailed",
]

logger = logging.getLogger(__name__)


class KVLink:
    """Block tables are kept by reference and read when a piece is copied: they may grow, but not change below it.

    Raises ConfigurationError when a ring slot cannot hold one layer of one token.
    """

    def __init__(
        self,
        channels: MessageChannels,
        store: PieceStore,
        layout: BlockLayout,
        config: TransferConfig,
        run_dir: str,
        me: WorkerInfo,
    ) -> None:
        self._totals = LinkTotals()
        self._held = HeldMessages(config.lease_s)
        self._rings = RingMaker(config, run_dir, me, channels)
        around = LinkSurroundings(channels, store, layout, config, self._rings, self._totals, self._held)
        self._sending = Sending(around)
        self._receiving = Receiving(around)

    # ---- prefill role ------------------------------------------------------------------------------------------

    def open_sender(
        self, request_id: str, peer: NodeRef, block_table: Sequence[int], num_tokens: int, now: float
    ) -> None:
        """Start handing a prompt over; call it when the request arrives, so that the receiver gets signs of life.

        Raises RequestError when a hand-over with this id is open.
        """
        self._sending.open(request_id, peer, block_table, num_tokens, now)

    def computed(self, request_id: str, num_tokens: int, now: float) -> None:
        """KV of the first `num_tokens` tokens is in the blocks: what the receiver lacks of it may leave."""
        self._sending.computed(request_id, num_tokens, now)

    def computing(self, request_id: str, stop: int, layers_done: int, now: float) -> None:
        """The tokens up to `stop` are being computed, KV of their first `layers_done` layers is in the blocks.

        Between two calls of `computed` it speaks of the one chunk that the later of them completes. Raises
        LocalProtocolError when it does not, or takes layers back.
        """
        self._sending.computing(request_id, stop, layers_done, now)

    def finish(self, request_id: str, hidden: bytes, num_cached_tokens: int, timeline: Timeline, now: float) -> None:
        """All is computed; the commit follows the last piece. `hidden`: last token's state, `[hidden_size]` float32."""
        self._sending.finish(request_id, hidden, num_cached_tokens, timeline, now)

    # ---- decode role -------------------------------------------------------------------------------------------

    def open_receiver(
        self,
        request_id: str,
        peer: NodeRef,
        block_table: Sequence[int],
        first_missing: int,
        num_tokens: int,
        now: float,
    ) -> None:
        """Grant: the blocks are there and lack the tokens `[first_missing, num_tokens)`.

        When the peer cannot be reached, ReceiveFailed comes with the next `pump` or `handle`. Raises RequestError when
        a hand-over with this id is open.
        """
        self._receiving.open(request_id, peer, block_table, first_missing, num_tokens, now)

    def transport_of(self, peer: NodeRef) -> str:
        """How KV from this peer comes, as in TransferConfig.transport. Raises PeerUnreachable, ConfigurationError."""
        return self._receiving.transport_to(peer)

    def is_granted(self, request_id: str) -> bool:
        """Has the receiver said that it has blocks for what is handed over to it under this id?"""
        return self._sending.is_granted(request_id)

    # ---- both --------------------------------------------------------------------------------------------------

    def abort(self, request_id: str, reason: str) -> None:
        """Give a hand-over up and tell the other side; no event follows. Nothing happens when there is none."""
        self._sending.abort(request_id, reason)
        self._receiving.abort(request_id, reason)

    def handle(self, incoming: Incoming, now: float) -> list[LinkEvent]:
        """Take one message; those that are not about hand-overs are left alone, wrong ones are counted and dropped."""
        try:
            match incoming.body:
                case RingOffer() | KVGrant() | KVCredit():
                    self._sending.handle(incoming.sender, incoming.body, now)
                case KVPiece() | KVProgress() | KVCommit():
                    self._receiving.handle(incoming, now)
                case RingGone(ring_id=ring_id) | GroupKey(ring_id=ring_id) as about_ring:
                    if self._sending.has_ring(incoming.sender, ring_id):
                        self._sending.handle(incoming.sender, about_ring, now)
                    else:
                        self._receiving.handle(incoming, now)
                case KVAbort() as abort:
                    if not (
                        self._sending.take_abort(incoming.sender, abort)
                        or self._receiving.take_abort(incoming.sender, abort)
                    ):
                        self._held.hold_unless_ended((abort.request_id, incoming.sender), abort, now)
        except RemoteProtocolError as error:
            self._totals.messages_refused += 1
            logger.debug("refused a message of %s: %s", incoming.sender.node_id, error)
        return self._take_events()

    def pump(self, now: float) -> list[LinkEvent]:
        """Move along what can move and end what has waited for too long. Call it on each turn of the loop."""
        self._sending.pump(now)
        self._receiving.pump(now)
        self._held.expire(now)
        return self._take_events()

    def drop_peer(self, ref: NodeRef) -> list[LinkEvent]:
        """A peer is gone: its hand-overs fail, its rings are dropped, its late messages find nothing."""
        self._sending.drop_peer(ref)
        self._receiving.drop_peer(ref)
        self._held.forget_peer(ref)
        return self._take_events()

    def counts(self) -> LinkCounts:
        return LinkCounts(
            senders=self._sending.num_sessions,
            receivers=self._receiving.num_sessions,
            ring_slots_in_use=self._sending.num_slots_in_use,
            bytes_sent=self._totals.bytes_sent,
            bytes_received=self._totals.bytes_received,
            messages_refused=self._totals.messages_refused,
            messages_unsent=self._totals.messages_unsent,
            staging_bytes=self._sending.staging_bytes + self._receiving.staging_bytes,
        )

    def close(self) -> None:
        """Give the staging memory back and wait for the threads of groups."""
        self._sending.close()
        self._receiving.close()
        self._rings.close()

    def _take_events(self) -> list[LinkEvent]:
        events = self._sending.events + self._receiving.events
        self._sending.events, self._receiving.events = [], []
        return events
