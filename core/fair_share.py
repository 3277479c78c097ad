"""FairShare: who has been served how much. The virtual token counter of Sheng et al. (OSDI'24), weights 1. Pure.

Each key (an API key) has a counter of the tokens it was served. Whoever has the lowest is next. A key that was idle
must not save up credit and then starve the others: when it has something waiting again, its counter is lifted to the
lowest of those that wait, or, when none does, to that of the last one that did.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

_LEAST_TO_FORGET = 64  # counters; fewer are not worth the search


class LowestKey:
    """A set of keys, and which has the lowest counter; among equals the one that came into the set first.

    Counters only grow, so a stale entry of the heap is never too high, and is corrected when it comes to the top.
    """

    def __init__(self, counter: Callable[[str], int]):
        self._counter = counter
        self._turns: dict[str, int] = {}  # key |-> when it came
        self._num_turns = 0
        self._heap: list[tuple[int, int, str]] = []

    def add(self, key: str) -> None:
        """Nothing happens when it is there."""
        if key not in self._turns:
            self._num_turns += 1
            self._turns[key] = self._num_turns
            heappush(self._heap, (self._counter(key), self._num_turns, key))

    def discard(self, key: str) -> None:
        self._turns.pop(key, None)
        if len(self._heap) > 2 * len(self._turns) + 16:
            self._heap = [(self._counter(k), turn, k) for k, turn in self._turns.items()]
            heapify(self._heap)

    def turn(self, key: str) -> int:
        """A number that grows from key to key in the order they came. Raises KeyError when it is not in the set."""
        return self._turns[key]

    def key(self) -> str | None:
        """The key with the lowest counter."""
        while self._heap:
            counter, turn, key = self._heap[0]
            if self._turns.get(key) != turn:
                heappop(self._heap)
            elif (now := self._counter(key)) != counter:
                heapreplace(self._heap, (now, turn, key))
            else:
                return key
        return None


class FairShare:
    """Counters of the keys that wait, and of those that are ahead of them."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._num_waiting: dict[str, int] = {}  # key |-> its entries in the queue
        self._floor = 0  # of the last key that waited
        self._waiting = LowestKey(self.counter)
        self._forget_at = _LEAST_TO_FORGET

    def counter(self, key: str) -> int:
        """Tokens served. One that is not remembered was not ahead of the others."""
        return self._counters[key] if key in self._counters else self.lowest()

    def lowest(self) -> int:
        """The lowest counter of the keys that wait."""
        key = self._waiting.key()
        return self._floor if key is None else self._counters[key]

    def enter(self, key: str) -> None:
        """One more entry of this key waits."""
        if key not in self._num_waiting:
            self._counters[key] = max(self._counters.get(key, 0), self.lowest())
            self._num_waiting[key] = 0
            self._waiting.add(key)
        self._num_waiting[key] += 1

    def leave(self, key: str) -> None:
        """One entry less of this key waits. Raises KeyError when none did."""
        self._num_waiting[key] -= 1
        if self._num_waiting[key] == 0:
            del self._num_waiting[key]
            self._waiting.discard(key)
            if not self._num_waiting:
                self._floor = self._counters[key]
            self._forget()

    def served(self, key: str, num_tokens: int) -> None:
        """Prompt tokens when they are taken up, output tokens when they are there."""
        self._counters[key] = self.counter(key) + num_tokens

    def _forget(self) -> None:
        """Keys that are idle and not ahead of the others would be lifted anyway: their counters say nothing."""
        if len(self._counters) >= self._forget_at:
            lowest = self.lowest()
            self._counters = {k: n for k, n in self._counters.items() if n > lowest or k in self._num_waiting}
            self._forget_at = max(2 * len(self._counters), _LEAST_TO_FORGET)
