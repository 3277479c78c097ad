"""WaitingQueue: who is next. The same queue stands in the gateway and in both kinds of worker. Pure; the time comes in.

The order is made of three choices, each on or off (QueuePolicy); all off is first come, first served:

    by_priority     the lowest priority number first. Whoever has waited for `ageing_s` counts as one class higher,
                    after twice that as two, and so on: every class moves, however much comes above it
    is_fair         within a class, the key with the fewest tokens served is next (fair_share.py)
    shortest_first  within a class (and key), the fewest uncached prompt tokens first. Each second of waiting counts as
                    `AGEING_TOKENS_PER_S` fewer, so a long prompt is passed for a bounded time

*Batch* requests stand apart, in the same order among themselves but without classes: they are next only when nothing
else waits and the caller says that there is slack. *Returning* requests (preempted, or their worker died) come before
all of their class.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import msgspec

from .errors import LocalProtocolError
from .fair_share import FairShare, LowestKey
from .request import Urgency

AGEING_TOKENS_PER_S = 1000.0


class QueuePolicy(msgspec.Struct, frozen=True):
    """Which orders apply, see above."""

    by_priority: bool = False
    is_fair: bool = False
    shortest_first: bool = False
    ageing_s: float = 10.0


FCFS = QueuePolicy()
PRIORITY = QueuePolicy(by_priority=True)
FAIR = QueuePolicy(by_priority=True, is_fair=True)
SHORTEST = QueuePolicy(by_priority=True, is_fair=True, shortest_first=True)
POLICIES = {"fcfs": FCFS, "priority": PRIORITY, "fair": FAIR, "shortest": SHORTEST}  # as named on the command line


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """One request. `priority` 0 is the highest."""

    request_id: str
    arrived_at: float
    num_tokens: int = 0  # of the prompt, that no cache has
    key: str = ""
    priority: int = 0
    is_batch: bool = False

    @classmethod
    def of(cls, request_id: str, urgency: Urgency, arrived_at: float, num_tokens: int) -> "Waiting":
        return cls(request_id, arrived_at, num_tokens, urgency.key, urgency.priority, urgency.is_batch)


class Rank(NamedTuple):
    """How urgent one is beside others, the lowest first: batch comes after everything interactive."""

    is_batch: bool
    level: int  # the class that it counts as, with what ageing has done for it


class WaitingQueue:
    """O(log n) comparisons per operation, and a memmove of a list. Ties are broken by the order of `push`."""

    def __init__(self, policy: QueuePolicy = FCFS):
        self._policy = policy
        self._places: dict[str, _Place] = {}
        self._num_pushes = 0
        self._shares = {is_batch: FairShare() for is_batch in (False, True)}
        self._lanes: dict[int, _Lane] = {}  # class |-> those that count as of it now
        self._batch = _Lane(self._shares[True].counter)
        self._promotions: list[tuple[float, int, str]] = []  # heap of (when, push, request)
        self.num_tokens = 0  # of all that wait
        self.num_batch = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._places

    # ---- entries -------------------------------------------------------------------------------------------------

    def push(self, entry: Waiting, *, returning: bool = False) -> None:
        """Raises LocalProtocolError when a request with that id waits already."""
        if entry.request_id in self._places:
            raise LocalProtocolError(f"request {entry.request_id} is in the queue already")
        self._num_pushes += 1
        place = _Place(entry, self._rank(entry), self._num_pushes, self._class(entry), returning)
        self._places[entry.request_id] = place
        if self._policy.is_fair:
            self._shares[entry.is_batch].enter(entry.key)
        self._lane(place).add(place, self._key(entry))
        self._promise(place)
        self.num_tokens += entry.num_tokens
        self.num_batch += entry.is_batch

    def peek(self, now: float, *, with_batch: bool = True) -> Waiting | None:
        """Who is next. `with_batch`: there is slack for batch requests."""
        self._promote(now)
        for level in sorted(self._lanes):
            if (place := self._lanes[level].head()) is not None:
                return place.entry
        place = self._batch.head() if with_batch else None
        return place.entry if place else None

    def pop(self, now: float, *, with_batch: bool = True) -> Waiting | None:
        entry = self.peek(now, with_batch=with_batch)
        return self.remove(entry.request_id) if entry else None

    def remove(self, request_id: str) -> Waiting | None:
        """Whoever it was, wherever it stood; None when it does not wait."""
        place = self._places.pop(request_id, None)
        if place is None:
            return None
        entry = place.entry
        lane = self._lane(place)
        lane.remove(place, self._key(entry))
        if not lane.is_busy and not entry.is_batch:
            del self._lanes[place.level]
        if self._policy.is_fair:
            self._shares[entry.is_batch].leave(entry.key)
        self.num_tokens -= entry.num_tokens
        self.num_batch -= entry.is_batch
        return entry

    def rank(self, request_id: str) -> Rank:
        """Of one who waits, as of the last `peek`. Raises KeyError when it does not wait."""
        place = self._places[request_id]
        return Rank(place.entry.is_batch, place.level)

    def served(self, key: str, num_tokens: int, *, is_batch: bool = False) -> None:
        """Tokens that a key has got: of a prompt when it is popped, of an answer when they are there."""
        if self._policy.is_fair:
            self._shares[is_batch].served(key, num_tokens)

    def in_order(self, now: float) -> list[Waiting]:
        """All that wait, batch last, as they would be popped if nobody came and each got its prompt's tokens."""
        self._promote(now)
        ordered: list[Waiting] = []
        interactive = _Forecast(self._shares[False].counter)
        for level in sorted(self._lanes):
            ordered += interactive.of(self._lanes[level])
        return ordered + list(_Forecast(self._shares[True].counter).of(self._batch))

    # ---- classes -------------------------------------------------------------------------------------------------

    def _rank(self, entry: Waiting) -> float:
        """Order within a class and key. With `shortest_first` age is in it, and yet it never changes."""
        if self._policy.shortest_first:
            return entry.num_tokens + AGEING_TOKENS_PER_S * entry.arrived_at
        return entry.arrived_at

    def _key(self, entry: Waiting) -> str:
        return entry.key if self._policy.is_fair else ""

    def _class(self, entry: Waiting) -> int:
        return max(entry.priority, 0) if self._policy.by_priority and not entry.is_batch else 0

    def _lane(self, place: "_Place") -> "_Lane":
        if place.entry.is_batch:
            return self._batch
        if place.level not in self._lanes:
            self._lanes[place.level] = _Lane(self._shares[False].counter)
        return self._lanes[place.level]

    def _promise(self, place: "_Place") -> None:
        """Note when it counts as one class higher than now."""
        if place.level > 0 and not place.entry.is_batch:
            num_classes = self._class(place.entry) - place.level + 1
            at = place.entry.arrived_at + num_classes * self._policy.ageing_s
            heappush(self._promotions, (at, place.number, place.entry.request_id))

    def _promote(self, now: float) -> None:
        while self._promotions and self._promotions[0][0] <= now:
            _, number, request_id = heappop(self._promotions)
            place = self._places.get(request_id)
            if place is None or place.number != number:
                continue
            key = self._key(place.entry)
            lane = self._lane(place)
            lane.remove(place, key)
            if not lane.is_busy:
                del self._lanes[place.level]
            place.level -= 1
            self._lane(place).add(place, key)
            self._promise(place)


class _Place(msgspec.Struct):
    """Where an entry stands. Ordered by (rank, number); returning ones by number, the last first."""

    entry: Waiting
    rank: float
    number: int
    level: int
    is_returning: bool


_Line = list[tuple[float, int, _Place]]  # sorted; numbers differ, so places are never compared


class _Lane:
    """Those of one class: returning ones, and a sorted line for each key."""

    def __init__(self, counter: Callable[[str], int]):
        self.returning: _Line = []
        self.lines: dict[str, _Line] = {}
        self._keys = LowestKey(counter)

    @property
    def is_busy(self) -> bool:
        return bool(self.returning or self.lines)

    def add(self, place: _Place, key: str) -> None:
        if place.is_returning:
            insort(self.returning, (0.0, -place.number, place))
            return
        insort(self.lines.setdefault(key, []), (place.rank, place.number, place))
        self._keys.add(key)

    def remove(self, place: _Place, key: str) -> None:
        if place.is_returning:
            del self.returning[bisect_left(self.returning, (0.0, -place.number))]
            return
        line = self.lines[key]
        del line[bisect_left(line, (place.rank, place.number))]
        if not line:
            del self.lines[key]
            self._keys.discard(key)

    def head(self) -> _Place | None:
        if self.returning:
            return self.returning[0][2]
        key = self._keys.key()
        return None if key is None else self.lines[key][0][2]

    def turn(self, key: str) -> int:
        return self._keys.turn(key)


class _Forecast:
    """The order of lanes, one after the other, if each entry is served its prompt's tokens when its turn comes."""

    def __init__(self, counter: Callable[[str], int]):
        self._counter = counter
        self._added: dict[str, int] = {}

    def of(self, lane: _Lane) -> Iterator[Waiting]:
        for _, _, place in lane.returning:
            yield self._serve(place.entry)
        heap = [(self._now(key), lane.turn(key), key, 0) for key in lane.lines]
        heapify(heap)
        while heap:
            counter, turn, key, index = heappop(heap)
            if counter != self._now(key):
                heappush(heap, (self._now(key), turn, key, index))
                continue
            yield self._serve(lane.lines[key][index][2].entry)
            if index + 1 < len(lane.lines[key]):
                heappush(heap, (self._now(key), turn, key, index + 1))

    def _now(self, key: str) -> int:
        return self._counter(key) + self._added.get(key, 0)

    def _serve(self, entry: Waiting) -> Waiting:
        self._added[entry.key] = self._added.get(entry.key, 0) + entry.num_tokens
        return entry
