"""What both tuners share: a setting that moves slowly and says why. Pure."""

import math
from dataclasses import dataclass, field

from ..core.tuner_event import TunerEvent

LEAST_GAIN = 0.1  # a change must be predicted to gain so much; less is noise
KNEE_SHARE = 0.9  # of the greatest throughput: where the knee of the throughput/latency curve is taken to be


@dataclass(frozen=True)
class Bounds:
    """Least and greatest value of a setting, both included. Equal: the value is forced."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"bounds of a setting must be 1 <= low <= high, not {self.low} and {self.high}")

    def clip(self, value: float) -> int:
        """The nearest integer within, rounded down."""
        return self.high if value >= self.high else max(math.floor(value), self.low)


def forced(value: int) -> Bounds:
    return Bounds(value, value)


@dataclass
class Setting:
    """One number that is tuned: within bounds, by at most a factor `ramp` and at most once in `interval_s`.

    It starts at `value` (clipped) and moves only where the wanted value is more than LEAST_GAIN away.
    """

    what: str
    value: int
    bounds: Bounds
    interval_s: float
    ramp: float = 2.0
    _changed_at: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self.value = self.bounds.clip(self.value)

    def may_change(self, now: float) -> bool:
        return now - self._changed_at >= self.interval_s

    def towards(self, wanted: float, reason: str, now: float, *, is_late: bool = False) -> TunerEvent | None:
        """Move in the direction of `wanted`; None when nothing changes.

        `is_late`: a target is being missed, so less is wanted however small the difference.
        """
        wanted = self.bounds.clip(wanted)
        lowest = self.value if is_late else self.value / (1 + LEAST_GAIN)
        if lowest <= wanted < self.value * (1 + LEAST_GAIN) or not self.may_change(now):
            return None
        return self.set(max(min(wanted, math.ceil(self.value * self.ramp)), int(self.value / self.ramp)), reason, now)

    def set(self, value: float, reason: str, now: float) -> TunerEvent | None:
        """Change at once, whatever the gain; None when it has that value already."""
        old, self.value = self.value, self.bounds.clip(value)
        if self.value == old:
            return None
        self._changed_at = now
        return TunerEvent(now, self.what, old, self.value, reason)


def in_ms(seconds: float) -> str:
    """For people: 4.2 ms, 61 ms."""
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
