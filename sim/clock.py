"""VirtualClock: time that jumps from event to event. The same events in the same order give the same run."""

from collections.abc import Callable
from heapq import heappop, heappush


class VirtualClock:
    """Seconds since the start. Events of one instant happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def read(self) -> float:
        """The time, as a clock that production code may be given."""
        return self.now

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Calls `action` at the time `when`; one that has passed already means now."""
        self._serial += 1
        heappush(self._events, (max(when, self.now), self._serial, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run(self, until: float = float("inf")) -> None:
        """Lets everything happen that is due up to `until`; returns early when nothing is left."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, action = heappop(events)
            self.num_events += 1
            action()
