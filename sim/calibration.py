"""What a fleet can do with a workload: unloaded latencies, from which targets follow, and its capacity."""

import dataclasses
from collections.abc import Mapping, Sequence

from ..core.errors import ConfigurationError
from ..core.latency import Distribution, distribution_ms, keeps_limits
from ..core.trace import TraceRow
from .simulation import FleetConfig, SimResult, Simulation
from .workload import timed_requests, trace_requests


def unloaded_medians_ms(config: FleetConfig, rows: Sequence[TraceRow]) -> tuple[float, float]:
    """Median TTFT and TPOT of the rows, each served alone by cold caches."""
    ttfts, tpots = [], []
    for row in rows:
        request = timed_requests([0.0], row.input_length, row.output_length)
        record = Simulation(config, request).run().records[0]
        if record.status == 200:
            ttfts.append(record.ttft_s)
            tpots.append(record.tpot_s or 0.0)
    ttft, tpot = _distribution(ttfts), _distribution(tpots)
    return ttft.median, tpot.median


def attainment(result: SimResult, limits_ms: Mapping[str, float]) -> float:
    """Share of the requests that arrived whose answer kept every limit."""
    kept = sum(record.status == 200 and keeps_limits(record, limits_ms) for record in result.records)
    return kept / len(result.records)


def capacity(
    config: FleetConfig,
    rows: Sequence[TraceRow],
    limits_ms: Mapping[str, float],
    share: float = 0.9,
    precision: float = 0.05,
) -> float:
    """The highest rate (requests/s) at which `share` of the requests keep every limit, by bisection.

    `precision` is relative. Nobody is refused while it is measured: requests wait as long as they must.
    """
    patient = dataclasses.replace(config, max_queue=10**9, max_queue_delay_s=float("inf"))

    def holds(rate: float) -> bool:
        return attainment(Simulation(patient, trace_requests(rows, rate)).run(), limits_ms) >= share

    low, high = 0.0, 1.0
    while holds(high):
        low, high = high, high * 2
    while high - low > precision * high and high > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _distribution(seconds: Sequence[float]) -> Distribution:
    found = distribution_ms(seconds)
    if found is None:
        raise ConfigurationError("none of the trace's requests fits this fleet; give a larger pool or shorter requests")
    return found
