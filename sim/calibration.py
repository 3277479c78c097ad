"""What a fleet can do with a workload: unloaded latencies, from which targets follow, its capacity, and goodput."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ..core.errors import ConfigurationError
from ..core.latency import Distribution, distribution_ms, keeps_limits
from ..core.trace import TraceRow
from .record import SimRecord
from .simulation import FleetConfig, Simulation
from .workload import SimRequest, timed_requests


def unloaded_records(config: FleetConfig, rows: Sequence[TraceRow]) -> list[SimRecord]:
    """What becomes of each row when it is served alone, by cold caches."""
    return [
        Simulation(config, timed_requests([0.0], row.input_length, row.output_length)).run().records[0] for row in rows
    ]


def unloaded_medians_ms(config: FleetConfig, rows: Sequence[TraceRow]) -> tuple[float, float]:
    """Median TTFT and TPOT of the rows, each served alone by cold caches."""
    return medians_ms(unloaded_records(config, rows))


def medians_ms(records: Sequence[SimRecord]) -> tuple[float, float]:
    """Median TTFT and TPOT of those that were answered."""
    complete = [record for record in records if record.status == 200]
    ttft = _distribution([record.ttft_s for record in complete])
    tpot = _distribution([record.tpot_s or 0.0 for record in complete])
    return ttft.median, tpot.median


def share_kept(records: Sequence[SimRecord], limits_ms: Mapping[str, float]) -> float:
    """Of those that arrived, how many were answered and kept every limit."""
    return sum(record.status == 200 and keeps_limits(record, limits_ms) for record in records) / len(records)


class Tally:
    """How many requests kept every limit, by the span of time in which they arrived, counted while a simulation runs.

    `spans` are disjoint, in seconds; who arrives outside of them does not count. A request is open until it is known
    to have kept or missed: it misses as soon as its first token is late, or its later ones cannot make up for it.
    """

    def __init__(
        self, requests: Sequence[SimRequest], spans: Sequence[tuple[float, float]], limits_ms: Mapping[str, float]
    ):
        self._requests = requests
        self._spans = spans
        self._limits_ms = limits_ms
        self._num_seen = 0
        self._open: list[SimRecord] = []
        self.arrived = [sum(low <= request.arrival_s < high for request in requests) for low, high in spans]
        self.kept = [0] * len(spans)
        self.missed = [0] * len(spans)

    @property
    def is_complete(self) -> bool:
        return sum(self.kept) + sum(self.missed) == sum(self.arrived)

    @property
    def most(self) -> int:
        """That can have kept every limit in the end."""
        return sum(self.arrived) - sum(self.missed)

    def update(self, records: Sequence[SimRecord], now: float) -> None:
        """`records` are those of all requests that have arrived, in order."""
        new, self._num_seen = records[self._num_seen :], len(records)
        still_open = []
        for record in (*self._open, *new):
            if (span := self._span(record.arrived_s)) is None:
                continue
            if record.status == 200:
                is_kept = keeps_limits(record, self._limits_ms)
            elif record.status or self._must_miss(record, now):
                is_kept = False
            else:
                still_open.append(record)
                continue
            (self.kept if is_kept else self.missed)[span] += 1
        self._open = still_open

    def _span(self, at: float) -> int | None:
        return next((index for index, (low, high) in enumerate(self._spans) if low <= at < high), None)

    def _must_miss(self, record: SimRecord, now: float) -> bool:
        has_first = record.output_tokens > 0
        ttft_s = (record.first_token_s if has_first else now) - record.arrived_s
        if ttft_s * 1000 > self._limits_ms.get("ttft", float("inf")):
            return True
        num_later = self._requests[record.index].output_tokens - 1
        tpot_s = (now - record.first_token_s) / num_later if has_first and num_later else 0.0
        return tpot_s * 1000 > self._limits_ms.get("tpot", float("inf"))


def capacity(
    config: FleetConfig,
    requests_at: Callable[[float], Sequence[SimRequest]],
    limits_ms: Mapping[str, float],
    share: float = 0.9,
    precision: float = 0.05,
) -> float:
    """The highest rate (requests/s) at which `share` of the requests keep every limit, by bisection.

    `requests_at` makes the workload of a rate, `precision` is relative. Nobody is refused while it is measured:
    requests wait as long as they must.
    """
    patient = dataclasses.replace(config, max_queue=10**9, max_queue_delay_s=float("inf"))

    def holds(rate: float) -> bool:
        requests = requests_at(rate)
        tally, needed = Tally(requests, [(0.0, float("inf"))], limits_ms), share * len(requests)

        def is_decided(records: Sequence[SimRecord], now: float) -> bool:
            tally.update(records, now)
            return sum(tally.kept) >= needed or tally.most < needed

        result = Simulation(patient, requests).run(is_decided)
        tally.update(result.records, result.virtual_s)
        return sum(tally.kept) >= needed

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
