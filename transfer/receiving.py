"""Receiving: all hand-overs that come into this worker. It alone writes into its blocks: the receiver places."""

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from xxhash import xxh3_64_intdigest

from ..core.errors import ConfigurationError, RemoteProtocolError, RequestError
from ..core.messages import (
    KVAbort,
    KVCommit,
    KVCredit,
    KVGrant,
    KVPiece,
    KVProgress,
    NodeRef,
    RingGone,
    RingOffer,
)
from ..core.timeline import Station, Timeline
from .backends.ring_backend import ReceiverBackend
from .backends.shared_memory import SharedMemoryReceiver
from .backends.tcp import TcpReceiver
from .link_types import HandedOver, LinkEvent, LinkSurroundings, ReceiveFailed
from .ring import ReceiverRing
from .session import KVReceiver
from .wire import Incoming, PeerUnreachable

logger = logging.getLogger(__name__)


@dataclass
class _Incoming:
    session: KVReceiver
    peer: NodeRef
    block_table: Sequence[int]
    copies: list[tuple[int, int]] = field(default_factory=list)  # (begin, end) of each, monotonic nanoseconds

    def copy_ns(self, since: int = 0) -> int:
        """Time spent copying pieces in, from `since` on."""
        return sum(end - max(begin, since) for begin, end in self.copies if end > since)


@dataclass
class _Ring:
    """The staging ring this worker made for one sender incarnation."""

    ring_id: int
    slots: ReceiverRing
    backend: ReceiverBackend


class Receiving:
    def __init__(self, around: LinkSurroundings) -> None:
        self._around = around
        self._incoming: dict[str, _Incoming] = {}  # request id |-> hand-over
        self._rings: dict[NodeRef, _Ring] = {}
        self._cannot_share: set[NodeRef] = set()  # peers that could not use shared memory
        self.events: list[LinkEvent] = []  # taken by KVLink

    @property
    def num_sessions(self) -> int:
        return len(self._incoming)

    # ---- the role's calls --------------------------------------------------------------------------------------

    def open(
        self,
        request_id: str,
        peer: NodeRef,
        block_table: Sequence[int],
        first_missing: int,
        num_tokens: int,
        now: float,
    ) -> None:
        if request_id in self._incoming:
            raise RequestError(f"request {request_id} is already being received; ids must be unique", status=409)
        session = KVReceiver(request_id, first_missing, num_tokens, now, self._around.config.lease_s)
        self._incoming[request_id] = _Incoming(session, peer, block_table)
        for held in self._around.held.open((request_id, peer), KVAbort):
            if isinstance(held, KVAbort):
                self.take_abort(peer, held)
                return
        try:
            ring = self._ring_for(peer)
            self._around.channels.send(peer, KVGrant(request_id, first_missing, ring.ring_id))
        except (PeerUnreachable, ConfigurationError) as error:
            self._fail(request_id, str(error))

    def abort(self, request_id: str, reason: str) -> None:
        if request_id in self._incoming:
            incoming = self._end(request_id, succeeded=False)
            self._around.tell(incoming.peer, KVAbort(request_id, reason))

    def transport_to(self, peer: NodeRef) -> str:
        """The transport of the ring that is there, else of the one that would be made."""
        if peer in self._rings:
            return self._rings[peer].backend.transport
        wanted, me = self._around.config.transport, self._around.me
        shares = bool(self._around.run_dir) and self._around.channels.peer_info(peer).host_digest == me.host_digest
        if wanted == "shared_memory" and not shares:
            raise ConfigurationError(
                f"{peer.node_id} shares no run directory with {me.ref.node_id}; use --transport auto or tcp"
            )
        return "shared_memory" if wanted != "tcp" and shares and peer not in self._cannot_share else "tcp"

    def _ring_for(self, peer: NodeRef) -> _Ring:
        """The ring of this pair, made and offered on first use."""
        if peer in self._rings:
            return self._rings[peer]
        config = self._around.config
        ring = _Ring(secrets.randbits(63), ReceiverRing(config.ring_slots), self._make_backend(peer))
        offer = RingOffer(ring.ring_id, ring.backend.transport, ring.backend.name, config.ring_slots, config.slot_bytes)
        try:
            self._around.channels.send(peer, offer)
        except PeerUnreachable:
            ring.backend.close()
            raise
        self._rings[peer] = ring
        return ring

    def _make_backend(self, peer: NodeRef) -> ReceiverBackend:
        config = self._around.config
        if self.transport_to(peer) == "tcp":
            return TcpReceiver()
        try:
            return SharedMemoryReceiver(self._around.run_dir, config.ring_slots, config.slot_bytes)
        except ConfigurationError as error:
            if config.transport != "auto":
                raise
            logger.warning("%s; KV from %s comes over TCP instead", error, peer.node_id)
            self._cannot_share.add(peer)
            return TcpReceiver()

    # ---- messages ----------------------------------------------------------------------------------------------

    def handle(self, incoming: Incoming, now: float) -> None:
        """Raises RemoteProtocolError for a message that is refused."""
        match incoming.body:
            case KVPiece() as piece:
                self._take_piece(incoming.sender, piece, incoming.payload, now)
            case KVCommit() as commit if self._has(commit.request_id, incoming.sender):
                self._take_commit(self._incoming[commit.request_id], commit, now)
            case KVProgress(request_id=request_id) if self._has(request_id, incoming.sender):
                self._incoming[request_id].session.progress(now)
            case RingGone(ring_id=ring_id):
                ring = self._rings.get(incoming.sender)
                if ring is None or ring.ring_id != ring_id:
                    raise RemoteProtocolError("a ring that is not in use is said to be gone")
                self._ring_refused(incoming.sender, ring)

    def take_abort(self, sender: NodeRef, abort: KVAbort) -> bool:
        """The sender gives a hand-over up. False when no such hand-over comes from it."""
        if not self._has(abort.request_id, sender):
            return False
        self._fail(abort.request_id, f"{sender.node_id} gave it up: {abort.reason}", tell=False)
        return True

    def _has(self, request_id: str, peer: NodeRef) -> bool:
        return request_id in self._incoming and self._incoming[request_id].peer == peer

    def _take_piece(self, sender: NodeRef, piece: KVPiece, payload: memoryview | None, now: float) -> None:
        """Verify and place a piece, or discard it when nobody wants it; either way its slot goes back, once."""
        ring = self._rings.get(sender)
        if ring is None or ring.ring_id != piece.ring_id:
            raise RemoteProtocolError("a piece in a ring that is not in use")
        ring.slots.check(piece.slot, piece.generation)
        incoming = self._incoming.get(piece.request_id)
        if incoming is not None and incoming.peer == sender:  # else it has ended, and nobody wants the piece
            try:
                self._place(incoming, ring, piece, payload, now)
            except RemoteProtocolError as error:
                logger.warning("a piece of %s from %s is wrong: %s", piece.request_id, sender.node_id, error)
                self._fail(piece.request_id, str(error))
        self._around.tell(sender, KVCredit(ring.ring_id, piece.slot, ring.slots.release(piece.slot)))

    def _place(self, incoming: _Incoming, ring: _Ring, piece: KVPiece, payload: memoryview | None, now: float) -> None:
        """Copy out, check the copy, scatter the copy. Raises RemoteProtocolError and has written nothing then."""
        layout = self._around.layout
        incoming.session.check(piece.start, piece.stop)
        span = (piece.first_layer, piece.last_layer, piece.first_head, piece.last_head)
        if span != (0, layout.num_layers, 0, layout.num_kv_heads):
            raise RemoteProtocolError(f"a piece of the layers and heads {span}; only whole tokens can be placed")
        expected = (piece.stop - piece.start) * layout.bytes_per_token
        if piece.num_bytes != expected or expected > self._around.config.slot_bytes:
            raise RemoteProtocolError(f"a piece of {piece.num_bytes} bytes where {expected} are right")
        began = time.monotonic_ns()
        copy = ring.backend.read(piece.slot, expected, payload)
        if xxh3_64_intdigest(copy) != piece.checksum:
            raise RemoteProtocolError(f"the checksum of the tokens [{piece.start}, {piece.stop}) is wrong")
        self._around.store.scatter(incoming.block_table, piece.start, piece.stop, copy)
        incoming.copies.append((began, time.monotonic_ns()))
        self._around.totals.bytes_received += expected
        incoming.session.placed(piece.start, piece.stop, now)
        self._end_if_complete(incoming)

    def _take_commit(self, incoming: _Incoming, commit: KVCommit, now: float) -> None:
        if incoming.session.commit is not None:
            raise RemoteProtocolError(f"a second commit of {commit.request_id}")
        sent_at = -commit.timeline.message_ns
        # Pieces that were copied in while the commit was on its way are not the message's time.
        arrived = Timeline(message_ns=time.monotonic_ns() - incoming.copy_ns(since=sent_at))
        try:
            if xxh3_64_intdigest(commit.hidden) != commit.hidden_checksum:
                raise RemoteProtocolError("the checksum of the hidden state is wrong")
            timeline = commit.timeline.merged(arrived)  # the sender subtracted the time of sending
            if not 0 <= timeline.message_ns <= self._around.config.lease_s * 1e9:  # another host's clock
                timeline = Timeline(timeline.stamps, timeline.copy_ns)
            incoming.session.committed(msgspec.structs.replace(commit, timeline=timeline), now)
        except RemoteProtocolError as error:
            self._fail(incoming.session.request_id, str(error))
        else:
            self._end_if_complete(incoming)

    def _end_if_complete(self, incoming: _Incoming) -> None:
        session = incoming.session
        if session.complete and session.commit is not None:
            self._end(session.request_id, succeeded=True)
            timeline = session.commit.timeline.merged(Timeline(copy_ns=incoming.copy_ns()))
            self.events.append(HandedOver(session.request_id, session.commit, timeline.stamped(Station.HANDED_OVER)))

    # ---- ends --------------------------------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """End what has been silent for too long."""
        for request_id, incoming in list(self._incoming.items()):
            if incoming.session.expired(now):
                self._fail(request_id, f"{incoming.peer.node_id} was silent for {self._around.config.lease_s:g} s")

    def drop_peer(self, peer: NodeRef) -> None:
        for request_id in [r for r, incoming in self._incoming.items() if incoming.peer == peer]:
            self._fail(request_id, f"{peer.node_id} is gone", tell=False)
        if ring := self._rings.pop(peer, None):
            ring.backend.close()
        self._cannot_share.discard(peer)

    def close(self) -> None:
        for ring in self._rings.values():
            ring.backend.close()
        self._rings.clear()

    def _ring_refused(self, peer: NodeRef, ring: _Ring) -> None:
        """The sender does not use this ring (any more): what needs it ends, the next hand-over gets a new one."""
        del self._rings[peer]
        ring.backend.close()
        if not ring.slots.was_used and ring.backend.transport == "shared_memory":
            self._cannot_share.add(peer)
        for request_id in [r for r, incoming in self._incoming.items() if incoming.peer == peer]:
            self._fail(request_id, f"{peer.node_id} gave the ring up")

    def _fail(self, request_id: str, reason: str, *, tell: bool = True) -> None:
        incoming = self._end(request_id, succeeded=False)
        incoming.session.failed()
        if tell:
            self._around.tell(incoming.peer, KVAbort(request_id, reason))
        self.events.append(ReceiveFailed(request_id, reason, incoming.session.contiguous_tokens))

    def _end(self, request_id: str, *, succeeded: bool) -> _Incoming:
        incoming = self._incoming.pop(request_id)
        self._around.held.end((request_id, incoming.peer), succeeded)
        return incoming
