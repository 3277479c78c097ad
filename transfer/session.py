"""KVSender and KVReceiver: the two ends of one hand-over. Pure: no socket, no clock; the time comes in with each call.

Sender (prefill)                                      Receiver (decode)

    WAITING    no grant yet; the prompt may already       RECEIVING  tokens and the commit are missing
      | GRANTED           be computed                       | ALL_PLACED        | COMMITTED
    SENDING    ranges leave as they are computed          PLACED              COMMITTED (tokens are missing)
      | COMMITTED                                           | COMMITTED         | ALL_PLACED
    COMMITTED                                             COMPLETE

and from every phase that is not an end, FAILED. A pair that is not in a table is the peer's fault when a message caused
it (RemoteProtocolError) and a bug here when a call did (LocalProtocolError).
"""

from bisect import bisect
from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

import msgspec

from ..core.errors import LocalProtocolError, RemoteProtocolError
from ..core.messages import KVCommit
from ..core.timeline import Timeline


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
    """Which tokens may leave now, each once, and when the commit is due.

    Grant and computation come in either order. Invariant: `first_missing <= next to send <= num_computed <= num_tokens`
    once granted and computed that far. The lease counts only while this side waits for the peer: for the grant when
    all is computed, for credits when there is something to send.
    """

    def __init__(self, request_id: str, num_tokens: int, now: float, lease_s: float) -> None:
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.phase = SenderPhase.WAITING
        self.num_computed = 0
        self.ring_id: int | None = None
        self._next = 0
        self._commit: KVCommit | None = None
        self._lease_s = lease_s
        self._alive_at = now

    def granted(self, first_missing: int, ring_id: int, now: float) -> None:
        """The receiver lacks the tokens from `first_missing` on. Raises RemoteProtocolError, also for a second one."""
        if not 0 <= first_missing <= self.num_tokens:
            raise RemoteProtocolError(f"a grant from token {first_missing} of {self.num_tokens}")
        self.phase = _advance(SENDER_TRANSITIONS, self.phase, SessionEvent.GRANTED, RemoteProtocolError)
        self._next, self.ring_id, self._alive_at = first_missing, ring_id, now

    def computed(self, num_tokens: int, now: float) -> None:
        """KV of the first `num_tokens` tokens exists. Raises LocalProtocolError when that is fewer than before."""
        if not self.num_computed <= num_tokens <= self.num_tokens:
            raise LocalProtocolError(f"computed {num_tokens} after {self.num_computed} of {self.num_tokens} tokens")
        self.num_computed, self._alive_at = num_tokens, now

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
        return self.phase is SenderPhase.SENDING and self._next < self.num_computed

    def next_range(self, max_tokens: int) -> tuple[int, int] | None:
        """The next tokens `[start, stop)` to send, at most `max_tokens`; each token is returned once."""
        if not self.has_range:
            return None
        start = self._next
        self._next = min(start + max_tokens, self.num_computed)
        return start, self._next

    @property
    def commit_due(self) -> bool:
        sent_all = self.phase is SenderPhase.SENDING and self._next == self.num_tokens
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


class KVReceiver:
    """Which tokens of the prompt have arrived, in any order, and whether all is there.

    `contiguous_tokens` tokens from the start of the prompt are present without a hole: what was there before the
    hand-over (`first_missing`) and what followed it. Who gives the hand-over up computes from there.
    """

    def __init__(self, request_id: str, first_missing: int, num_tokens: int, now: float, lease_s: float) -> None:
        if not 0 <= first_missing <= num_tokens:
            raise LocalProtocolError(f"{first_missing} of {num_tokens} tokens are said to be here")
        self.request_id = request_id
        self.first_missing = first_missing
        self.num_tokens = num_tokens
        self.phase = ReceiverPhase.RECEIVING if first_missing < num_tokens else ReceiverPhase.PLACED
        self.commit: KVCommit | None = None
        self._placed: list[tuple[int, int]] = []  # disjoint, sorted, neighbours merged
        self._lease_s = lease_s
        self._alive_at = now

    def check(self, start: int, stop: int) -> None:
        """Raises RemoteProtocolError unless `[start, stop)` is wanted and none of it is here."""
        if not self.first_missing <= start < stop <= self.num_tokens:
            wanted = f"[{self.first_missing}, {self.num_tokens})"
            raise RemoteProtocolError(f"a piece of the tokens [{start}, {stop}) where {wanted} are wanted")
        if any(start < there_stop and there_start < stop for there_start, there_stop in self._placed):
            raise RemoteProtocolError(f"the tokens [{start}, {stop}) came twice")

    def placed(self, start: int, stop: int, now: float) -> None:
        """`[start, stop)` is in the blocks, verified. Raises RemoteProtocolError as `check` does."""
        self.check(start, stop)
        index = bisect(self._placed, (start, stop))
        if index < len(self._placed) and self._placed[index][0] == stop:
            stop = self._placed.pop(index)[1]
        if index > 0 and self._placed[index - 1][1] == start:
            index -= 1
            start = self._placed.pop(index)[0]
        self._placed.insert(index, (start, stop))
        self._alive_at = now
        if self._placed == [(self.first_missing, self.num_tokens)]:
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
        follows = self._placed and self._placed[0][0] == self.first_missing
        return self._placed[0][1] if follows else self.first_missing

    def failed(self) -> None:
        self.phase = _advance(RECEIVER_TRANSITIONS, self.phase, SessionEvent.FAILED, LocalProtocolError)

    def expired(self, now: float) -> bool:
        """Has the sender been silent for longer than the lease, with something still missing?"""
        is_open = self.phase not in (ReceiverPhase.COMPLETE, ReceiverPhase.FAILED)
        return is_open and now - self._alive_at > self._lease_s
