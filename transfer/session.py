"""KVSender and KVReceiver: the two ends of one hand-over. Pure: no socket, no clock; the time comes in with each call.

Sender (prefill)                                      Receiver (decode)

    WAITING    no grant yet; the prompt may already       RECEIVING  tokens and the commit are missing
      | GRANTED           be computed                       | ALL_PLACED        | COMMITTED
    SENDING    pieces leave as they are computed          PLACED              COMMITTED (tokens are missing)
      | COMMITTED                                           | COMMITTED         | ALL_PLACED
    COMMITTED                                             COMPLETE

and from every phase that is not an end, FAILED. A pair that is not in a table is the peer's fault when a message caused
it (RemoteProtocolError) and a bug here when a call did (LocalProtocolError).
"""

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

import msgspec

from ..core.errors import LocalProtocolError, RemoteProtocolError
from ..core.messages import KVCommit
from ..core.timeline import Timeline
from .coverage import Coverage, PieceRange


class SessionEvent(StrEnum):
    GRANTED = "granted"
    ALL_PLACED = "all_placed"
    COMMITTED = "committed"
    FAILED = "failed"  # aborted by either side, expired, corrupt, peer gone


class SenderPhase(StrEnum):
    WAITING = "waiting"
    SENDING = "sending"
    COMMITTED = "committed"
    FAILED = "failed"


class ReceiverPhase(StrEnum):
    RECEIVING = "receiving"
    PLACED = "placed"
    COMMITTED = "committed"
    COMPLETE = "complete"
    FAILED = "failed"


SENDER_TRANSITIONS: dict[SenderPhase, dict[SessionEvent, SenderPhase]] = {
    SenderPhase.WAITING: {SessionEvent.GRANTED: SenderPhase.SENDING, SessionEvent.FAILED: SenderPhase.FAILED},
    SenderPhase.SENDING: {SessionEvent.COMMITTED: SenderPhase.COMMITTED, SessionEvent.FAILED: SenderPhase.FAILED},
    SenderPhase.COMMITTED: {},
    SenderPhase.FAILED: {},
}
RECEIVER_TRANSITIONS: dict[ReceiverPhase, dict[SessionEvent, ReceiverPhase]] = {
    ReceiverPhase.RECEIVING: {
        SessionEvent.ALL_PLACED: ReceiverPhase.PLACED,
        SessionEvent.COMMITTED: ReceiverPhase.COMMITTED,
        SessionEvent.FAILED: ReceiverPhase.FAILED,
    },
    ReceiverPhase.PLACED: {
        SessionEvent.COMMITTED: ReceiverPhase.COMPLETE,
        SessionEvent.FAILED: ReceiverPhase.FAILED,
    },
    ReceiverPhase.COMMITTED: {
        SessionEvent.ALL_PLACED: ReceiverPhase.COMPLETE,
        SessionEvent.FAILED: ReceiverPhase.FAILED,
    },
    ReceiverPhase.COMPLETE: {},
    ReceiverPhase.FAILED: {},
}

Phase = TypeVar("Phase", SenderPhase, ReceiverPhase)


def _advance(
    table: Mapping[Phase, Mapping[SessionEvent, Phase]],
    phase: Phase,
    event: SessionEvent,
    fault: type[LocalProtocolError] | type[RemoteProtocolError],
) -> Phase:
    if event not in table[phase]:
        raise fault(f"a hand-over in phase {phase} cannot take the event {event}")
    return table[phase][event]


class KVSender:
    """Which tokens of which layers may leave now, each once, and when the commit is due.

    Of the tokens `[0, num_computed)` all layers are there; of the chunk that is being computed, `[num_computed, stop)`,
    the first layers only. Grant and computation come in either order. The lease counts only while this side waits for
    the peer: for the grant when all is computed, for credits when there is something to send.
    """

    def __init__(self, request_id: str, num_tokens: int, num_layers: int, now: float, lease_s: float) -> None:
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.num_layers = num_layers
        self.phase = SenderPhase.WAITING
        self.num_computed = 0
        self.ring_id: int | None = None
        self._chunk_stop = 0  # end of the chunk that is being computed; num_computed: none is
        self._chunk_layers = 0  # of it, layers that are computed
        self._first_missing = 0
        self._unsent: deque[PieceRange] = deque()  # computed and not sent, in the order of computation
        self._commit: KVCommit | None = None
        self._lease_s = lease_s
        self._alive_at = now

    def granted(self, first_missing: int, ring_id: int, now: float) -> None:
        """The receiver lacks the tokens from `first_missing` on. Raises RemoteProtocolError, also for a second one."""
        if not 0 <= first_missing <= self.num_tokens:
            raise RemoteProtocolError(f"a grant from token {first_missing} of {self.num_tokens}")
        self.phase = _advance(SENDER_TRANSITIONS, self.phase, SessionEvent.GRANTED, RemoteProtocolError)
        self._first_missing, self.ring_id, self._alive_at = first_missing, ring_id, now
        before, self._unsent = self._unsent, deque()
        for piece in before:
            self._add(piece)

    def computing(self, stop: int, layers_done: int, now: float) -> None:
        """The tokens up to `stop` are being computed; KV of their first `layers_done` layers exists.

        Raises LocalProtocolError when that is less than before, or another chunk than the one not yet `computed`.
        """
        has_chunk = self._chunk_stop > self.num_computed
        is_chunk = stop == self._chunk_stop if has_chunk else self.num_computed < stop <= self.num_tokens
        before = self._chunk_layers if has_chunk else 0
        if not is_chunk or not before <= layers_done <= self.num_layers:
            raise LocalProtocolError(
                f"computing {layers_done} layers up to token {stop} of {self.num_tokens}, after {before} layers up to "
                f"{self._chunk_stop}"
            )
        self._add(PieceRange(self.num_computed, stop, before, layers_done))
        self._chunk_stop, self._chunk_layers, self._alive_at = stop, layers_done, now

    def computed(self, num_tokens: int, now: float) -> None:
        """KV of the first `num_tokens` tokens exists. Raises LocalProtocolError when that is fewer than before."""
        if not self.num_computed <= num_tokens <= self.num_tokens:
            raise LocalProtocolError(f"computed {num_tokens} after {self.num_computed} of {self.num_tokens} tokens")
        if num_tokens > self.num_computed:
            self.computing(num_tokens, self.num_layers, now)
            self.num_computed = num_tokens
        self._alive_at = now

    def finished(self, commit: KVCommit, now: float) -> None:
        """All is computed; `commit` leaves after the last range. Raises LocalProtocolError when it is not."""
        if self.num_computed != self.num_tokens or self._commit is not None:
            raise LocalProtocolError(f"finished with {self.num_computed} of {self.num_tokens} tokens, or twice")
        self._commit, self._alive_at = commit, now

    def alive(self, now: float) -> None:
        """The receiver showed a sign of life: a credit came back."""
        self._alive_at = now

    @property
    def has_range(self) -> bool:
        return self.phase is SenderPhase.SENDING and bool(self._unsent)

    def next_range(self, max_cells: int) -> PieceRange | None:
        """What to send next, at most `max_cells` (token, layer) pairs; each pair is returned once."""
        if not self.has_range:
            return None
        whole = self._unsent.popleft()
        num_tokens = max(1, min(max_cells // whole.num_layers, whole.num_tokens))
        first = whole._replace(stop=whole.start + num_tokens)
        piece = first._replace(last_layer=min(first.last_layer, first.first_layer + max_cells // num_tokens))
        for rest in (whole._replace(start=first.stop), first._replace(first_layer=piece.last_layer)):
            if rest.num_tokens and rest.num_layers:
                self._unsent.appendleft(rest)
        return piece

    def _add(self, piece: PieceRange) -> None:
        """What the receiver lacks of this piece is to be sent; with its neighbour in one piece where they fit."""
        piece = piece._replace(start=max(piece.start, self._first_missing))
        if piece.num_tokens <= 0 or piece.num_layers == 0:
            return
        while self._unsent and (joined := _joined(self._unsent[-1], piece)) is not None:
            self._unsent.pop()
            piece = joined
        self._unsent.append(piece)

    @property
    def commit_due(self) -> bool:
        sent_all = self.phase is SenderPhase.SENDING and self.num_computed == self.num_tokens and not self._unsent
        return sent_all and self._commit is not None

    def commit(self, timeline: Timeline) -> KVCommit:
        """The message to send, with `timeline` merged into its own. Raises LocalProtocolError when it is not due."""
        if self._commit is None or not self.commit_due:
            raise LocalProtocolError("the commit comes after the last piece")
        return msgspec.structs.replace(self._commit, timeline=self._commit.timeline.merged(timeline))

    def committed(self) -> None:
        """The commit has left."""
        self.phase = _advance(SENDER_TRANSITIONS, self.phase, SessionEvent.COMMITTED, LocalProtocolError)

    def failed(self) -> None:
        self.phase = _advance(SENDER_TRANSITIONS, self.phase, SessionEvent.FAILED, LocalProtocolError)

    def expired(self, now: float) -> bool:
        """Has this side waited for the peer for longer than the lease?"""
        waits_for_grant = self.phase is SenderPhase.WAITING and self._commit is not None
        return (waits_for_grant or self.has_range) and now - self._alive_at > self._lease_s


def _joined(first: PieceRange, second: PieceRange) -> PieceRange | None:
    """Both as one rectangle, when they are neighbours in layers or in tokens."""
    if first[:2] == second[:2] and first.last_layer == second.first_layer:
        return first._replace(last_layer=second.last_layer)
    if first[2:] == second[2:] and first.stop == second.start:
        return first._replace(stop=second.stop)
    return None


class KVReceiver:
    """Which tokens of which layers have arrived, in any order, and whether all is there.

    `contiguous_tokens` tokens from the start of the prompt are present, in all layers and without a hole: what was
    there before the hand-over (`first_missing`) and what followed it. Who gives the hand-over up computes from there.
    """

    def __init__(
        self, request_id: str, first_missing: int, num_tokens: int, num_layers: int, now: float, lease_s: float
    ) -> None:
        if not 0 <= first_missing <= num_tokens:
            raise LocalProtocolError(f"{first_missing} of {num_tokens} tokens are said to be here")
        self.request_id = request_id
        self.first_missing = first_missing
        self.num_tokens = num_tokens
        self.phase = ReceiverPhase.RECEIVING if first_missing < num_tokens else ReceiverPhase.PLACED
        self.commit: KVCommit | None = None
        self._placed = Coverage(num_layers)
        self._lease_s = lease_s
        self._alive_at = now

    def check(self, piece: PieceRange) -> None:
        """Raises RemoteProtocolError unless all of this piece is wanted and none of it is here."""
        tokens_fit = self.first_missing <= piece.start < piece.stop <= self.num_tokens
        if not (tokens_fit and 0 <= piece.first_layer < piece.last_layer <= self._placed.num_layers):
            wanted = PieceRange(self.first_missing, self.num_tokens, 0, self._placed.num_layers)
            raise RemoteProtocolError(f"a piece of {tuple(piece)} where {tuple(wanted)} is wanted")
        if self._placed.overlaps(piece):
            raise RemoteProtocolError(f"the piece {tuple(piece)} came twice, or a part of it")

    def placed(self, piece: PieceRange, now: float) -> None:
        """The piece is in the blocks, verified. Raises RemoteProtocolError as `check` does."""
        self.check(piece)
        self._placed.add(piece)
        self._alive_at = now
        if self.contiguous_tokens == self.num_tokens:
            self.phase = _advance(RECEIVER_TRANSITIONS, self.phase, SessionEvent.ALL_PLACED, RemoteProtocolError)

    def committed(self, commit: KVCommit, now: float) -> None:
        """The sender says all pieces are out. Raises RemoteProtocolError when it speaks of another prompt, or twice."""
        if (commit.request_id, commit.num_tokens) != (self.request_id, self.num_tokens):
            raise RemoteProtocolError(f"a commit of {commit.num_tokens} tokens where {self.num_tokens} are wanted")
        self.phase = _advance(RECEIVER_TRANSITIONS, self.phase, SessionEvent.COMMITTED, RemoteProtocolError)
        self.commit, self._alive_at = commit, now

    def progress(self, now: float) -> None:
        """The sender is alive: the lease starts anew."""
        self._alive_at = now

    @property
    def complete(self) -> bool:
        return self.phase is ReceiverPhase.COMPLETE

    @property
    def contiguous_tokens(self) -> int:
        return self._placed.reach(self.first_missing)

    def failed(self) -> None:
        self.phase = _advance(RECEIVER_TRANSITIONS, self.phase, SessionEvent.FAILED, LocalProtocolError)

    def expired(self, now: float) -> bool:
        """Has the sender been silent for longer than the lease, with something still missing?"""
        is_open = self.phase not in (ReceiverPhase.COMPLETE, ReceiverPhase.FAILED)
        return is_open and now - self._alive_at > self._lease_s
