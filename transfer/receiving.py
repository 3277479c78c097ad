"""Receiving: all hand-overs that come into this worker. It alone writes into its blocks: the receiver places."""

import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from xxhash import xxh3_64_intdigest

from ..core.errors import ConfigurationError, RemoteProtocolError, RequestError
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
)
from ..core.timeline import Station, Timeline
from .backends.ring_backend import ReceiverBackend, RingBroken
from .coverage import PieceRange
from .link_types import HandedOver, LinkEvent, ReceiveFailed
from .ring import ReceiverRing
from .session import KVReceiver
from .surroundings import LinkSurroundings
from .wire import Incoming, PeerUnreachable

logger = logging.getLogger(__name__)

GROUPS = ("gloo", "nccl")  # bytes come in the order of their announcements; what broke once is not formed again


class _WrongBytes(RemoteProtocolError):
    """What arrived is not what was announced."""


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
    announced: deque[tuple[KVPiece, memoryview | None]] = field(default_factory=deque)  # published, not copied out


class Receiving:
    def __init__(self, around: LinkSurroundings) -> None:
        self._around = around
        self._incoming: dict[str, _Incoming] = {}  # request id |-> hand-over
        self._rings: dict[NodeRef, _Ring] = {}
        self.events: list[LinkEvent] = []  # taken by KVLink

    @property
    def num_sessions(self) -> int:
        return len(self._incoming)

    @property
    def staging_bytes(self) -> int:
        return sum(ring.backend.num_bytes for ring in self._rings.values())

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
        num_layers, lease_s = self._around.layout.num_layers, self._around.config.lease_s
        session = KVReceiver(request_id, first_missing, num_tokens, num_layers, now, lease_s)
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
        return self._around.rings.transport_to(peer)

    def _ring_for(self, peer: NodeRef) -> _Ring:
        """The ring of this pair, made and offered on first use."""
        if peer in self._rings:
            return self._rings[peer]
        config = self._around.config
        ring = _Ring(secrets.randbits(63), ReceiverRing(config.ring_slots), self._around.rings.make(peer))
        offer = RingOffer(ring.ring_id, ring.backend.transport, ring.backend.name, config.ring_slots, config.slot_bytes)
        try:
            self._around.channels.send(peer, offer)
        except PeerUnreachable:
            self._around.rings.release(ring.backend)
            raise
        self._rings[peer] = ring
        return ring

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
            case RingGone(ring_id=ring_id) if not self._around.rings.let_go(incoming.sender, ring_id):
                ring = self._ring(incoming.sender, ring_id)
                self._drop_ring(incoming.sender, ring, "the sender gave the ring up")
                self._around.rings.let_go(incoming.sender, ring_id)
            case GroupKey(ring_id=ring_id, key=key, value=value):
                self._ring(incoming.sender, ring_id).backend.entry_arrived((key, value))

    def _ring(self, peer: NodeRef, ring_id: int) -> _Ring:
        ring = self._rings.get(peer)
        if ring is None or ring.ring_id != ring_id:
            raise RemoteProtocolError("a message about a ring that is not in use")
        return ring

    def take_abort(self, sender: NodeRef, abort: KVAbort) -> bool:
        """The sender gives a hand-over up. False when no such hand-over comes from it."""
        if not self._has(abort.request_id, sender):
            return False
        self._fail(abort.request_id, f"{sender.node_id} gave it up: {abort.reason}", tell=False)
        return True

    def _has(self, request_id: str, peer: NodeRef) -> bool:
        return request_id in self._incoming and self._incoming[request_id].peer == peer

    def _take_piece(self, sender: NodeRef, piece: KVPiece, payload: memoryview | None, now: float) -> None:
        """A piece was published: it is taken in when its bytes are there, which they may be by now."""
        ring = self._ring(sender, piece.ring_id)
        ring.slots.announced(piece.slot, piece.generation)
        ring.announced.append((piece, payload))
        try:
            ring.backend.announced(piece.slot, piece.num_bytes)
            self._take_arrived(sender, ring, now)
        except RingBroken as error:
            self._give_up(sender, ring, str(error))

    def _take_arrived(self, sender: NodeRef, ring: _Ring, now: float) -> None:
        """Verify and place pieces, or discard what nobody wants; either way the slot goes back, once.

        Raises RingBroken when what is announced will never be there.
        """
        while ring.announced and ring.backend.has_arrived(ring.announced[0][0].slot):
            piece, payload = ring.announced.popleft()
            incoming = self._incoming.get(piece.request_id)
            if incoming is not None and incoming.peer == sender:  # else it has ended
                try:
                    self._place(incoming, ring, piece, payload, now)
                except RemoteProtocolError as error:
                    logger.warning("a piece of %s from %s is wrong: %s", piece.request_id, sender.node_id, error)
                    self._fail(piece.request_id, str(error))
                    if isinstance(error, _WrongBytes) and ring.backend.transport in GROUPS:
                        raise RingBroken("the bytes are out of step with what was announced") from error
            self._around.tell(sender, KVCredit(ring.ring_id, piece.slot, ring.slots.release(piece.slot)))

    def _place(self, incoming: _Incoming, ring: _Ring, piece: KVPiece, payload: memoryview | None, now: float) -> None:
        """Copy out, check the copy, scatter the copy. Raises RemoteProtocolError and has written nothing then."""
        layout = self._around.layout
        part = PieceRange(piece.start, piece.stop, piece.first_layer, piece.last_layer)
        incoming.session.check(part)
        if (piece.first_head, piece.last_head) != (0, layout.num_kv_heads):
            raise RemoteProtocolError(f"a piece of the heads [{piece.first_head}, {piece.last_head}) alone")
        expected = layout.piece_bytes(part.num_tokens, part.num_layers)
        if piece.num_bytes != expected or expected > self._around.config.slot_bytes:
            raise RemoteProtocolError(f"a piece of {piece.num_bytes} bytes where {expected} are right")
        began = time.monotonic_ns()
        copy = ring.backend.read(piece.slot, expected, payload)
        if self._around.checksum(copy) != piece.checksum:
            raise _WrongBytes(f"the checksum of the piece {tuple(part)} is wrong")
        layers = {"first_layer": part.first_layer, "last_layer": part.last_layer}
        self._around.store.scatter(incoming.block_table, part.start, part.stop, copy, **layers)
        incoming.copies.append((began, time.monotonic_ns()))
        self._around.totals.bytes_received += expected
        incoming.session.placed(part, now)
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
        """Take in what has arrived, end what has been silent for too long."""
        for peer, ring in list(self._rings.items()):
            for key, value in ring.backend.take_entries():
                self._around.tell(peer, GroupKey(ring.ring_id, key, value))
            try:
                self._take_arrived(peer, ring, now)
                ring.backend.check()
            except RingBroken as error:
                self._give_up(peer, ring, str(error))
        for request_id, incoming in list(self._incoming.items()):
            if incoming.session.expired(now):
                self._fail(request_id, f"{incoming.peer.node_id} was silent for {self._around.config.lease_s:g} s")

    def drop_peer(self, peer: NodeRef) -> None:
        for request_id in [r for r, incoming in self._incoming.items() if incoming.peer == peer]:
            self._fail(request_id, f"{peer.node_id} is gone", tell=False)
        if ring := self._rings.pop(peer, None):
            self._around.rings.release(ring.backend)
        self._around.rings.forget(peer)

    def close(self) -> None:
        for peer, ring in self._rings.items():
            self._around.rings.give_up(peer, ring.ring_id, ring.backend)
        self._rings.clear()

    def _give_up(self, peer: NodeRef, ring: _Ring, reason: str) -> None:
        """The ring broke on this side."""
        self._around.tell(peer, RingGone(ring.ring_id))
        self._drop_ring(peer, ring, reason)

    def _drop_ring(self, peer: NodeRef, ring: _Ring, reason: str) -> None:
        """What needs this ring ends, the next hand-over gets a new one; another kind, unless this one did work."""
        del self._rings[peer]
        if ring.backend.transport in GROUPS or not ring.slots.was_used:
            self._around.rings.failed(peer, ring.backend.transport, reason)
        self._around.rings.give_up(peer, ring.ring_id, ring.backend)
        for request_id in [r for r, incoming in self._incoming.items() if incoming.peer == peer]:
            self._fail(request_id, f"{peer.node_id}: {reason}")

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
