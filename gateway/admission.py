"""Admission: who waits for credit, in which order, for how long, and who had better not wait at all. Pure.

Two classes have bounds of their own: interactive requests (`max_queue`, `max_queue_delay_s`) and batch requests, of
which more may wait, for longer. Whoever is over a bound is refused and told when to come back: after its place in the
queue over the rate at which the queue moves, which is that of the credits given back of late; of those that are
refused together each is told one place later than the one before. A full queue keeps out nobody who would be served
before those in it: the last of the lowest class makes way for a higher one and, where the order is fair, the last of
the key with the most waiting for another key's.

With a target for the time to the first token, an interactive request is refused as soon as it is certain to miss it:

    when it comes      its place / rate is more than the target
    while it waits     the target has passed
    when it is its turn    waited + wait > patience      patience = max(target - own - margin, target / 4)

`wait` is predicted from the chosen route until its own computation begins, `own` for that computation. The margin is
what the predictions of late have to be forgiven: under overload everybody is accepted who is just in time, so that
half of them would be late. A prompt that is too long for the target even alone still gets a quarter of it to wait: on
an idle server it is answered. Before anything can be predicted, nobody is sent to a worker while one that was sent
there has waited for a quarter of the target since then.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass

import msgspec

from ..core.queueing import FCFS, QueuePolicy, Waiting, WaitingQueue
from ..core.request import Urgency
from .credits import Credits

TICK_INTERVAL_S = 0.05  # between two looks at who has waited for too long
BATCH_QUEUE = 4  # times as long as that of interactive requests
BATCH_DELAY_S = 3600.0
LEAST_PATIENCE = 0.25  # of the target
STUCK = 0.25  # of the target: so long without a first token is too long, where nothing can be predicted
_REMEMBERED_ERRORS = 64  # of predictions
_FORGIVEN = 0.9  # of them are covered by the margin
_MOST_MARGIN = 0.5  # of the target
_RATE_WINDOW_S = 10.0
_LEAST_RELEASES = 3  # since the queue began, before a wait is predicted from them
_PLACES_AGE_S = 0.25
_SHORTEST_RETRY_S = 1
_LONGEST_RETRY_S = 60


class Place(msgspec.Struct, frozen=True):
    """In the queue: 1 is next. `start_s`: seconds until its turn as things go now, where that is known."""

    position: int
    start_s: float | None


@dataclass
class _Bound:
    """When a request that waits is given up, and the reason that is counted then."""

    at: float
    reason: str


class Admission:
    """The queue, in the order of `policy`, and the credits. Requests are named by their ids.

    `max_queue` and `max_queue_delay_s` are for interactive requests. `ttft_target_s` None: none is refused early.
    """

    def __init__(
        self,
        max_queue: int,
        max_queue_delay_s: float,
        policy: QueuePolicy = FCFS,
        ttft_target_s: float | None = None,
    ):
        self.credits = Credits()
        self._max_queue = max_queue
        self._max_queue_delay_s = max_queue_delay_s
        self._ttft_target_s = ttft_target_s
        self._is_order_simple = policy == FCFS
        self._policy = policy
        self._queue = WaitingQueue(policy)
        self._new: dict[str, Waiting] = {}  # those that wait for the first time, in the order they came
        self._bounds: dict[str, _Bound] = {}
        self._releases: deque[float] = deque()
        self._errors: deque[float] = deque(maxlen=_REMEMBERED_ERRORS)  # seconds
        self._margin_s = 0.0
        self._since: dict[bool, float] = {}  # is batch |-> since when one or another of them has had to wait
        self._promised: dict[bool, float] = {}  # is batch |-> when the last one that was refused may come back
        self._places: dict[str, int] = {}  # request |-> position, as of
        self._places_at = -math.inf

    # ---- the queue ---------------------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_batch_queued(self) -> int:
        return self._queue.num_batch

    def is_full(self, *, is_batch: bool) -> bool:
        if is_batch:
            return self._queue.num_batch >= BATCH_QUEUE * self._max_queue
        return self._num_interactive >= self._max_queue

    def who_makes_way(self, urgency: Urgency) -> str | None:
        """The request to refuse in place of a newcomer when the queue is full; None: the newcomer itself."""
        waiting = [entry for entry in self._new.values() if entry.is_batch == urgency.is_batch]
        if self._policy.by_priority and not urgency.is_batch:
            lowest = max((entry.priority for entry in waiting), default=urgency.priority)
            waiting = [entry for entry in waiting if entry.priority == lowest]
            if lowest != urgency.priority:
                return waiting[-1].request_id if lowest > urgency.priority else None
        if not self._policy.is_fair or not waiting:
            return None
        counts = Counter(entry.key for entry in waiting)
        key, most = counts.most_common(1)[0]
        if most <= counts[urgency.key] + 1:
            return None
        return next(entry.request_id for entry in reversed(waiting) if entry.key == key)

    def enqueue(self, entry: Waiting, *, returning: bool = False) -> None:
        """`returning`: it was sent out already and comes back, before all of its class; its target counts no more.

        Raises LocalProtocolError when it waits already.
        """
        self._queue.push(entry, returning=returning)
        self._bounds[entry.request_id] = self._bound(entry, returning)
        if not returning:
            self._new[entry.request_id] = entry
        self._since.setdefault(entry.is_batch, entry.arrived_at)

    def head(self, now: float) -> Waiting | None:
        """Whose turn it is; batch requests when nobody else waits."""
        return self._queue.peek(now)

    def in_order(self, now: float) -> list[Waiting]:
        """All that wait, the head first."""
        return self._queue.in_order(now)

    def dequeue(self, request_id: str) -> None:
        """Nothing happens when it does not wait."""
        entry = self._queue.remove(request_id)
        if entry is None:
            return
        del self._bounds[request_id]
        self._new.pop(request_id, None)
        if not (self._queue.num_batch if entry.is_batch else self._num_interactive):
            del self._since[entry.is_batch]

    def expired(self, now: float) -> list[tuple[str, str]]:
        """Those that have waited for longer than allowed, with the reason: queue_delay, or deadline."""
        return [(request_id, bound.reason) for request_id, bound in self._bounds.items() if now > bound.at]

    def served(self, key: str, num_tokens: int, *, is_batch: bool) -> None:
        """Tokens of a prompt that was sent out, or of an answer that have come."""
        self._queue.served(key, num_tokens, is_batch=is_batch)

    def _bound(self, entry: Waiting, returning: bool) -> _Bound:
        if entry.is_batch:
            return _Bound(entry.arrived_at + BATCH_DELAY_S, "queue_delay")
        patient = _Bound(entry.arrived_at + self._max_queue_delay_s, "queue_delay")
        target = self._ttft_target_s
        if target is None or returning:
            return patient
        # The answer must not come later than the target: the look before the last one decides, the last may be late.
        deadline = entry.arrived_at + max(target - 2 * TICK_INTERVAL_S, target / 2)
        return _Bound(deadline, "deadline") if deadline < patient.at else patient

    @property
    def _num_interactive(self) -> int:
        return len(self._queue) - self._queue.num_batch

    # ---- what is to be expected --------------------------------------------------------------------------------------

    def release(self, request_id: str, now: float, *, was_served: bool = True) -> None:
        """Its credit is free. Raises LocalProtocolError when it holds none.

        `was_served`: its worker gave an answer for it. What was refused there, or was on a worker that died, says
        nothing of how fast places become free.
        """
        self.credits.release(request_id, now, was_served=was_served)
        if was_served:
            self._releases.append(now)
            self._forget_old_releases(now)

    def place(self, request_id: str, now: float) -> Place | None:
        """Where it stands, at most some tenths of a second ago; None when it does not wait."""
        if request_id not in self._queue:
            return None
        if request_id not in self._places or now - self._places_at > _PLACES_AGE_S:
            order = enumerate(self._queue.in_order(now), start=1)
            self._places = {entry.request_id: position for position, entry in order}
            self._places_at = now
        position = self._places[request_id]
        rate = self._rate(now, is_batch=self._queue.rank(request_id).is_batch)
        return Place(position, None if rate is None else position / rate)

    def queue_s(self, now: float) -> float:
        """Seconds that an interactive request which comes now waits for credit, as things go now.

        While too few were served to tell: as long as those in front have waited.
        """
        if not self._num_interactive:
            return 0.0
        rate = self._rate(now, is_batch=False)
        return now - self._since[False] if rate is None else self._num_interactive / rate

    def is_hopeless(self, request_id: str, now: float) -> bool:
        """Its turn comes after its target, as things go now. For one that has just come."""
        target, rate = self._ttft_target_s, self._rate(now, is_batch=False)
        bound = self._bounds.get(request_id)
        if target is None or rate is None or bound is None or bound.reason != "deadline":
            return False
        if self._num_interactive / rate <= target:
            return False  # wherever it stands
        if self._is_order_simple:
            return True  # it is the last one
        place = self.place(request_id, now)
        return place is not None and place.position / rate > target

    def is_too_late(self, waited_s: float, wait_s: float, own_s: float) -> bool:
        """Should an interactive request that has waited be refused although it is its turn? See above."""
        target = self._ttft_target_s
        if target is None:
            return False
        margin_s = min(self._margin_s, target * _MOST_MARGIN)
        return waited_s + wait_s > max(target - own_s - margin_s, target * LEAST_PATIENCE)

    def is_stuck(self, sent_s: float) -> bool:
        """Is a request that was sent so long ago, and has no first token yet, a sign that no more should be sent?"""
        return self._ttft_target_s is not None and sent_s > self._ttft_target_s * STUCK

    def first_token(self, predicted_s: float, measured_s: float) -> None:
        """It has come, after so many seconds from the choice of its route."""
        self._errors.append(measured_s - predicted_s)
        ordered = sorted(self._errors)
        self._margin_s = max(ordered[int(_FORGIVEN * (len(ordered) - 1))], 0.0)

    def deadline_text(self, retry_after: int) -> str:
        """What a request is told that `is_hopeless`, `is_too_late` or past its deadline. Needs a target."""
        target_ms = (self._ttft_target_s or 0.0) * 1e3
        return (
            f"its first token could not come within the {target_ms:g} ms target, all workers are busy; try again in "
            f"{retry_after} s"
        )

    def retry_after(self, now: float, *, is_batch: bool = False) -> int:
        """Seconds until a new request can expect credit, and one place later than whoever was told so before.

        Each call promises a place. Once all of the next _LONGEST_RETRY_S are promised, it begins with the first again.
        """
        rate = self._rate(now, is_batch=is_batch)
        if rate is None:
            rate = sum(1 for at in self._releases if now - at <= _RATE_WINDOW_S) / _RATE_WINDOW_S
        if rate == 0:  # nobody knows: what is in flight is taken to end one by one
            soonest_s = min(self._max_queue_delay_s, _RATE_WINDOW_S)
            gap_s = soonest_s / max(self.credits.num_in_flight, 1)
        else:
            num_before = len(self._queue) if is_batch else self._num_interactive
            gap_s = 1 / rate
            soonest_s = (num_before + 1) * gap_s
        soonest_s = min(max(soonest_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
        at = max(now + soonest_s, self._promised.get(is_batch, -math.inf) + gap_s)
        if at > now + _LONGEST_RETRY_S:
            at = now + soonest_s
        self._promised[is_batch] = at
        return math.ceil(at - now)

    def _rate(self, now: float, *, is_batch: bool) -> float | None:
        """Credits given back per second while somebody waited: while nobody did, they say nothing of what the workers
        can do. For interactive requests it must have been one of them: batch ones leave room that they could have
        used. Of the last seconds, or where the workers are slow of as long as the last few took. None: too few.
        """
        began = min(self._since.values(), default=None) if is_batch else self._since.get(False)
        if began is None:
            return None
        since = max(began, now - _RATE_WINDOW_S)
        num_releases = sum(1 for at in self._releases if at > since)
        if num_releases < _LEAST_RELEASES:
            starts = [began, *(at for at in self._releases if at > began)]  # a release ends where the next one starts
            since = starts[-_LEAST_RELEASES - 1] if len(starts) > _LEAST_RELEASES else now
            num_releases = _LEAST_RELEASES
        return num_releases / (now - since) if now > since else None

    def _forget_old_releases(self, now: float) -> None:
        while len(self._releases) > _LEAST_RELEASES + 1 and now - self._releases[0] > _RATE_WINDOW_S:
            self._releases.popleft()
