"""Sending: all hand-overs that go out of this worker. Pieces leave in the order the prompts were opened."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from ..core.errors import LocalProtocolError, RemoteProtocolError, RequestError
from ..core.messages import (
    GroupKey,
    KVAbort,
    KVCommit,
    KVCredit,
    KVGrant,
    KVPiece,
    KVProgress,
    Message,
    NodeRef,
    RingGone,
    RingOffer,
)
from ..core.timeline import Timeline
from .backends.ring_backend import RingBroken, SenderBackend
from .link_types import LinkEvent, SendDone, SendFailed
from .ring import SenderRing
from .session import KVSender, SenderPhase
from .surroundings import LinkSurroundings
from .wire import PeerUnreachable

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 1.0


@dataclass
class _Outgoing:
    session: KVSender
    peer: NodeRef
    block_table: Sequence[int]  # the sequence's own list: it may still grow, but not below what is computed
    said_at: float  # when the peer last heard of this hand-over
    copy_ns: int = 0


@dataclass
class _Ring:
    """The staging ring one peer offered."""

    ring_id: int
    slots: SenderRing
    backend: SenderBackend
    slot_bytes: int


class Sending:
    def __init__(self, around: LinkSurroundings) -> None:
        self._around = around
        self._outgoing: dict[str, _Outgoing] = {}  # request id |-> hand-over; oldest first
        self._rings: dict[NodeRef, _Ring] = {}
        self._progress_interval_s = min(PROGRESS_INTERVAL_S, around.config.lease_s / 4)
        self.events: list[LinkEvent] = []  # taken by KVLink

    @property
    def num_sessions(self) -> int:
        return len(self._outgoing)

    @property
    def num_slots_in_use(self) -> int:
        return sum(ring.slots.num_in_use for ring in self._rings.values())

    @property
    def staging_bytes(self) -> int:
        return sum(ring.backend.num_bytes for ring in self._rings.values())

    # ---- the role's calls --------------------------------------------------------------------------------------

    def open(self, request_id: str, peer: NodeRef, block_table: Sequence[int], num_tokens: int, now: float) -> None:
        if request_id in self._outgoing:
            raise RequestError(f"request {request_id} is already being handed over; ids must be unique", status=409)
        session = KVSender(request_id, num_tokens, self._around.layout.num_layers, now, self._around.config.lease_s)
        self._outgoing[request_id] = _Outgoing(session, peer, block_table, now)
        for body in self._around.held.open((request_id, peer), KVAbort, KVGrant):
            match body:
                case KVGrant() as grant:
                    self._take_grant(peer, grant, now)
                case KVAbort() as abort:
                    self.take_abort(peer, abort)

    def computed(self, request_id: str, num_tokens: int, now: float) -> None:
        """A hand-over that has failed is unknown here before its role hears of it: then this does nothing."""
        if outgoing := self._outgoing.get(request_id):
            outgoing.session.computed(num_tokens, now)
            self._send_what_may(outgoing, now)

    def computing(self, request_id: str, stop: int, layers_done: int, now: float) -> None:
        """As `computed` for a hand-over that has failed."""
        if outgoing := self._outgoing.get(request_id):
            outgoing.session.computing(stop, layers_done, now)
            self._send_what_may(outgoing, now)

    def finish(self, request_id: str, hidden: bytes, num_cached_tokens: int, timeline: Timeline, now: float) -> None:
        """As `computed` for a hand-over that has failed."""
        if outgoing := self._outgoing.get(request_id):
            num_tokens, checksum = outgoing.session.num_tokens, xxh3_64_intdigest(hidden)
            commit = KVCommit(request_id, num_tokens, num_cached_tokens, hidden, checksum, timeline)
            outgoing.session.finished(commit, now)
            self._send_what_may(outgoing, now)

    def is_granted(self, request_id: str) -> bool:
        outgoing = self._outgoing.get(request_id)
        return outgoing is not None and outgoing.session.ring_id is not None

    def abort(self, request_id: str, reason: str) -> None:
        if request_id in self._outgoing:
            outgoing = self._end(request_id, succeeded=False)
            self._around.tell(outgoing.peer, KVAbort(request_id, reason))

    # ---- messages ----------------------------------------------------------------------------------------------

    def handle(self, sender: NodeRef, body: Message, now: float) -> None:
        """Raises RemoteProtocolError for a message that is refused."""
        match body:
            case RingOffer():
                self._attach(sender, body)
            case KVCredit(ring_id=ring_id, slot=slot, generation=generation):
                if not self.has_ring(sender, ring_id):
                    raise RemoteProtocolError("a credit for a ring that is not in use")
                self._rings[sender].slots.credit(slot, generation)
                for outgoing in [o for o in self._outgoing.values() if o.peer == sender]:
                    outgoing.session.alive(now)
                    self._send_what_may(outgoing, now)
            case KVGrant() as grant:
                self._take_grant(sender, grant, now)
            case GroupKey(key=key, value=value):
                self._rings[sender].backend.entry_arrived((key, value))
            case RingGone():
                self._drop_ring(sender, f"{sender.node_id} gave the ring up")

    def has_ring(self, peer: NodeRef, ring_id: int) -> bool:
        """Is this ring the one in use towards this peer?"""
        return peer in self._rings and self._rings[peer].ring_id == ring_id

    def take_abort(self, sender: NodeRef, abort: KVAbort) -> bool:
        """The receiver gives a hand-over up. False when no such hand-over goes out to it."""
        if not self._has(abort.request_id, sender):
            return False
        self._fail(abort.request_id, f"{sender.node_id} gave it up: {abort.reason}", tell=False)
        return True

    def _take_grant(self, sender: NodeRef, grant: KVGrant, now: float) -> None:
        """A grant that makes no sense ends the hand-over; one for what has failed is answered; an early one waits."""
        key = (grant.request_id, sender)
        if not self._has(*key):
            if self._around.held.has_failed(key):
                self._around.tell(sender, KVAbort(grant.request_id, "the prefill worker has given this request up"))
            self._around.held.hold_unless_ended(key, grant, now)
            return
        outgoing = self._outgoing[grant.request_id]
        if outgoing.session.phase is not SenderPhase.WAITING:
            raise RemoteProtocolError(f"a second grant for {grant.request_id}")
        try:
            outgoing.session.granted(grant.first_missing_token, grant.ring_id, now)
            ring = self._rings.get(sender)
            nothing_to_send = grant.first_missing_token == outgoing.session.num_tokens
            if not nothing_to_send and (ring is None or ring.ring_id != grant.ring_id):
                # Its offer came before the grant and the ring was dropped since: waiting would not bring it back.
                raise RemoteProtocolError("the granted ring is not in use here")
        except RemoteProtocolError as error:
            self._fail(grant.request_id, str(error))
        else:
            self._send_what_may(outgoing, now)

    def _has(self, request_id: str, peer: NodeRef) -> bool:
        return request_id in self._outgoing and self._outgoing[request_id].peer == peer

    def _attach(self, peer: NodeRef, offer: RingOffer) -> None:
        """Use the ring a peer made for us; a newer one replaces the older. What cannot be used is sent back."""
        if self.has_ring(peer, offer.ring_id):
            return
        self._drop_ring(peer, f"{peer.node_id} replaced its ring")
        try:
            backend = self._around.rings.attach(offer, self._around.layout.piece_bytes(1, 1), peer)
        except RemoteProtocolError:
            self._around.tell(peer, RingGone(offer.ring_id))
            raise
        self._rings[peer] = _Ring(offer.ring_id, SenderRing(offer.num_slots), backend, offer.slot_bytes)

    # ---- pieces ------------------------------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Send what may leave, say that prompts are alive, end what has waited for too long."""
        for request_id, outgoing in list(self._outgoing.items()):
            self._send_what_may(outgoing, now)
            session = outgoing.session
            if session.expired(now):
                self._fail(request_id, f"{outgoing.peer.node_id} was silent for {self._around.config.lease_s:g} s")
            elif session.phase is SenderPhase.SENDING and now - outgoing.said_at >= self._progress_interval_s:
                outgoing.said_at = now
                self._around.tell(outgoing.peer, KVProgress(request_id, session.num_computed))
        for peer, ring in list(self._rings.items()):
            self._tend(peer, ring, now)

    def _tend(self, peer: NodeRef, ring: _Ring, now: float) -> None:
        """Tell the peer what its end of the ring needs; drop a ring that broke or whose slots do not come back."""
        for key, value in ring.backend.take_entries():
            self._around.tell(peer, GroupKey(ring.ring_id, key, value))
        oldest = ring.slots.oldest_taken_at
        try:
            if oldest is not None and now - oldest > self._around.config.lease_s:
                raise RingBroken(f"{peer.node_id} did not give a ring slot back")
            ring.backend.check()
        except RingBroken as error:
            self._drop_ring(peer, str(error))

    def _send_what_may(self, outgoing: _Outgoing, now: float) -> None:
        """Pieces while there are tokens and free slots, then the commit. An unreachable peer ends the hand-over."""
        session = outgoing.session
        try:
            ring = self._rings.get(outgoing.peer)
            if ring is not None and ring.ring_id == session.ring_id:
                while session.has_range and (taken := ring.slots.take(now)) is not None:
                    self._send_piece(outgoing, ring, *taken)
                    outgoing.said_at = now
            if session.commit_due:
                # The receiver adds the time of arrival: what remains is how long the message took.
                timeline = Timeline(copy_ns=outgoing.copy_ns, message_ns=-time.monotonic_ns())
                self._around.channels.send(outgoing.peer, session.commit(timeline))
                session.committed()
                self._end(session.request_id, succeeded=True)
                self.events.append(SendDone(session.request_id))
        except PeerUnreachable as error:
            self._fail(session.request_id, str(error))

    def _send_piece(self, outgoing: _Outgoing, ring: _Ring, slot: int, generation: int) -> None:
        layout, totals = self._around.layout, self._around.totals
        part = outgoing.session.next_range(ring.slot_bytes // layout.piece_bytes(1, 1))
        if part is None:
            raise LocalProtocolError("a slot was taken for nothing")
        num_bytes = layout.piece_bytes(part.num_tokens, part.num_layers)
        began = time.perf_counter_ns()
        piece = ring.backend.write(slot, num_bytes)
        layers = {"first_layer": part.first_layer, "last_layer": part.last_layer}
        if self._around.store.gather(outgoing.block_table, part.start, part.stop, piece, **layers) != num_bytes:
            raise LocalProtocolError(f"the pool gave another number of bytes than {num_bytes}")
        checksum = self._around.checksum(piece)
        outgoing.copy_ns += time.perf_counter_ns() - began
        message = KVPiece(
            request_id=outgoing.session.request_id,
            ring_id=ring.ring_id,
            slot=slot,
            generation=generation,
            start=part.start,
            stop=part.stop,
            **layers,
            first_head=0,
            last_head=layout.num_kv_heads,
            num_bytes=num_bytes,
            checksum=checksum,
        )
        try:
            self._around.channels.send(outgoing.peer, message, ring.backend.payload_for(slot))
        except PeerUnreachable:
            ring.slots.put_back(slot)  # never published, so nobody else will give it back
            raise
        ring.backend.published(slot, num_bytes)
        totals.bytes_sent += num_bytes

    # ---- ends --------------------------------------------------------------------------------------------------

    def drop_peer(self, peer: NodeRef) -> None:
        for request_id in [r for r, outgoing in self._outgoing.items() if outgoing.peer == peer]:
            self._fail(request_id, f"{peer.node_id} is gone", tell=False)
        self._drop_ring(peer, f"{peer.node_id} is gone", tell=False)

    def close(self) -> None:
        for ring in self._rings.values():
            self._around.rings.release(ring.backend)
        self._rings.clear()

    def _drop_ring(self, peer: NodeRef, reason: str, *, tell: bool = True) -> None:
        """Close this end and say so, which is how the peer learns that nobody has its memory mapped any more."""
        ring = self._rings.pop(peer, None)
        if ring is None:
            return
        self._around.rings.release(ring.backend)
        if tell:
            self._around.tell(peer, RingGone(ring.ring_id))
        users = [r for r, o in self._outgoing.items() if o.peer == peer and o.session.ring_id == ring.ring_id]
        for request_id in users:
            self._fail(request_id, reason)

    def _fail(self, request_id: str, reason: str, *, tell: bool = True) -> None:
        outgoing = self._end(request_id, succeeded=False)
        outgoing.session.failed()
        if tell:
            self._around.tell(outgoing.peer, KVAbort(request_id, reason))
        self.events.append(SendFailed(request_id, reason))

    def _end(self, request_id: str, *, succeeded: bool) -> _Outgoing:
        outgoing = self._outgoing.pop(request_id)
        self._around.held.end((request_id, outgoing.peer), succeeded)
        ring, ring_id = self._rings.get(outgoing.peer), outgoing.session.ring_id
        if not succeeded and ring_id is not None and (ring is None or ring.ring_id != ring_id):
            self._around.tell(outgoing.peer, RingGone(ring_id))  # its offer was lost: the receiver must make another
        return outgoing
