"""Latencies and their distributions, defined as in `vllm bench serve`: what a load and a simulation both report.

TTFT, TPOT and E2EL have one value per successful request, ITL one per gap between chunks, pooled over requests.
Percentiles interpolate linearly between the two nearest samples (numpy's default).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


class Distribution(msgspec.Struct, frozen=True):
    """Milliseconds."""

    mean: float
    median: float
    p90: float
    p95: float
    p99: float


class Latencies(Protocol):
    """One request that succeeded, in seconds. `tpot_s` is None for a single-token answer."""

    @property
    def ttft_s(self) -> float: ...

    @property
    def tpot_s(self) -> float | None: ...

    @property
    def e2el_s(self) -> float: ...


def time_per_output_token(ttft_s: float, e2el_s: float, num_output_tokens: int) -> float | None:
    """Mean time of the tokens after the first; None for a single token, which has no such time."""
    return (e2el_s - ttft_s) / (num_output_tokens - 1) if num_output_tokens > 1 else None


def keeps_limits(request: Latencies, limits_ms: Mapping[str, float]) -> bool:
    """Whether a successful request kept every limit; a single-token answer has a TPOT of 0 here."""
    measured = {"ttft": request.ttft_s, "tpot": request.tpot_s or 0.0, "e2el": request.e2el_s}
    return all(measured[name] * 1000 <= limit for name, limit in limits_ms.items())


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of the ascending, non-empty `ordered` lie, linearly interpolated."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution_ms(seconds: Iterable[float]) -> Distribution | None:
    """The distribution of samples given in seconds, in milliseconds; None without samples."""
    ordered = sorted(value * 1000 for value in seconds)
    if not ordered:
        return None
    return Distribution(sum(ordered) / len(ordered), *(percentile(ordered, p) for p in (50, 90, 95, 99)))


def counted_distribution_ms(counted_seconds: Iterable[tuple[float, int]]) -> Distribution | None:
    """As `distribution_ms` of each value repeated as often as its count says, without making the repeats."""
    ordered = sorted((value * 1000, count) for value, count in counted_seconds if count > 0)
    total = sum(count for _, count in ordered)
    if not total:
        return None
    mean = sum(value * count for value, count in ordered) / total
    return Distribution(mean, *(_counted_percentile(ordered, total, p) for p in (50, 90, 95, 99)))


def _counted_percentile(ordered: Sequence[tuple[float, int]], total: int, percent: float) -> float:
    position = (total - 1) * percent / 100
    below = int(position)
    num_before = 0
    for index, (value, count) in enumerate(ordered):
        num_before += count
        if below < num_before:
            above = value if below + 1 < num_before or index + 1 == len(ordered) else ordered[index + 1][0]
            return value + (above - value) * (position - below)
    raise ValueError("the counts do not add up to the total")
