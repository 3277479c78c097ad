"""Cases to measurements, and measurements to one aligned table or JSON."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch

from .case import Case, Run
from .limits import DeviceLimits
from .timing import Timer, Timing, time_runs

HIGHEST_FRACTION, WIDEST_SPREAD = 1.05, 0.5  # beyond them a row is doubtful
_MAX_COPIES = 128
_MAX_COPY_BYTES = 8 * 1024**3  # of all operands of one case


@dataclass(frozen=True, slots=True)
class Measurement:
    """One case on one device. `problem`: why there is no timing."""

    case: Case
    limits: DeviceLimits
    timing: Timing | None
    problem: str = ""

    @property
    def floor(self) -> float:
        """Seconds the device needs at its measured best."""
        rate = self.limits.flops_per_second[self.case.rate]
        return self.case.cost.floor_seconds(self.limits.bytes_per_second, rate)

    @property
    def bound(self) -> str:
        """What the floor is made of."""
        by_bytes = self.case.cost.bytes / self.limits.bytes_per_second
        return "memory" if by_bytes >= self.floor else "compute"

    @property
    def fraction(self) -> float | None:
        """Of the measured limit: floor over time."""
        return None if self.timing is None else self.floor / self.timing.median

    @property
    def goal(self) -> float:
        """The fraction that is wanted; 0: none was set."""
        return self.case.goal or self.case.goal_flops / self.limits.flops_per_second[self.case.rate]

    @property
    def is_doubtful(self) -> bool:
        """Faster than the device can be, or too uneven to mean much."""
        if self.timing is None or self.fraction is None:
            return False
        return self.fraction > HIGHEST_FRACTION or self.timing.spread > WIDEST_SPREAD

    def as_json(self) -> dict[str, object]:
        return {
            "op": self.case.op,
            "size": self.case.size,
            "bytes": self.case.cost.bytes,
            "flops": self.case.cost.flops,
            "floor_s": self.floor,
            "bound": self.bound,
            "timing": None if self.timing is None else asdict(self.timing),
            "fraction": self.fraction,
            "is_doubtful": self.is_doubtful,
            "goal": self.goal or None,
            "problem": self.problem,
        }


def copies_for(num_bytes: int, cold_bytes: int) -> int:
    """How many runs with operands of their own, of `num_bytes` each, find nothing of the last round in a cache."""
    wanted = math.ceil(cold_bytes / max(num_bytes, 1))
    return max(1, min(wanted, _MAX_COPIES, _MAX_COPY_BYTES // max(num_bytes, 1)))


@torch.inference_mode()
def measure(cases: Iterable[Case], timer: Timer, limits: DeviceLimits, budget_s: float) -> Iterator[Measurement]:
    """Each case for about `budget_s`, as soon as it is asked for. One that fails says why, and the next goes on."""
    for case in cases:
        try:
            runs: list[Run] = [case.make() for _ in range(copies_for(case.cost.bytes, timer.cold_bytes))]
            yield Measurement(case, limits, time_runs(timer, runs, budget_s))
        except Exception as error:  # no memory, a kernel that does not compile, a launch that was refused: a finding
            yield Measurement(case, limits, None, f"{type(error).__name__}: {error}".splitlines()[0])
        runs = []
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


HEADER = (
    f"{'op':<25}{'size':<21}{'bytes':>9}{'ops':>9}{'time':>11}{'spread':>8}{'floor':>11}"
    f"  {'bound':<8}{'of limit':>8}{'goal':>6}"
)


def table_line(result: Measurement) -> str:
    """One line of at most 120 columns, under HEADER."""
    case = result.case
    start = f"{case.op:<25}{case.size:<21}{_count(case.cost.bytes):>9}{_count(case.cost.flops):>9}"
    if result.timing is None or result.fraction is None:
        return f"{start}  {result.problem}"[:120]
    goal = (f"{result.goal:>6.0%}" if result.goal else " " * 6) + (" ?" if result.is_doubtful else "")
    return (
        f"{start}{_duration(result.timing.median):>11}{result.timing.spread:>8.0%}{_duration(result.floor):>11}"
        f"  {result.bound:<8}{result.fraction:>8.1%}{goal}"
    ).rstrip()


def doubt_text(results: Iterable[Measurement]) -> list[str]:
    """What the mark behind a row means, where there is one."""
    count = sum(result.is_doubtful for result in results)
    if not count:
        return []
    what = f"{count} row{'s' if count > 1 else ''} above {HIGHEST_FRACTION:.0%} of the limit or spread by more than"
    return [
        "",
        f"?: {what} {WIDEST_SPREAD:.0%}: the machine was",
        "   busy or the limit measured too low. Run again when it is idle.",
    ]


def limits_text(limits: DeviceLimits) -> str:
    rates = ", ".join(f"{rate / 1e12:.3g} TFLOP/s {name}" for name, rate in limits.flops_per_second.items())
    return f"measured limits: {limits.bytes_per_second / 1e9:,.1f} GB/s, {rates}"


def _count(number: int) -> str:
    """`1.23 G`, at most 7 characters."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:  # which rounds to 1
            return f"{number / factor:.3g} {unit}"
    return str(number)


def _duration(seconds: float) -> str:
    for factor, unit in ((1.0, "s "), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.9995 * factor:
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
