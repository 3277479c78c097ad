"""What the measuring scripts offer a real server: prompts and answers of mixed lengths, alone or at Poisson times."""

import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.bench.arrivals import poisson_arrivals
from baton.bench.metrics import Metrics, compute_metrics
from baton.bench.options import BenchConfig, LoadOptions, WorkloadOptions
from baton.bench.report import Report
from baton.bench.run import run
from baton.core.trace import TraceRow

TTFT_FACTOR, TPOT_FACTOR = 4.0, 2.0  # of the unloaded medians: the targets
ENOUGH_KEPT = 0.9  # of the requests: the load is within the capacity
_NUM_ALONE = 12
_CONCURRENCY = 16  # at which throughput bounds the search for the capacity
_LEAST_SHARE = 0.3  # of that, which is always within it
_NUM_PROBES = 4  # so it is found to about 5 % of the greatest throughput


@dataclass(frozen=True)
class Mix:
    """Lengths in tokens, least and greatest, all equally likely."""

    name: str
    prompts: tuple[int, int]
    answers: tuple[int, int]

    @property
    def middle(self) -> TraceRow:
        return TraceRow(0.0, sum(self.prompts) // 2, sum(self.answers) // 2)


MIXES = {  # so short that a core a worker serves several a second: in a minute there are enough to tell settings apart
    mix.name: mix for mix in (Mix("chat", (16, 48), (6, 18)), Mix("prompt-heavy", (24, 72), (4, 6)))
}


class Targets(msgspec.Struct, frozen=True):
    """What a request must keep to count, in milliseconds."""

    ttft_ms: float
    tpot_ms: float

    @property
    def flags(self) -> tuple[str, ...]:
        """For `baton serve`."""
        return "--ttft-target", f"{self.ttft_ms:.0f}ms", "--tpot-target", f"{self.tpot_ms:.0f}ms"

    @property
    def limits_ms(self) -> dict[str, float]:
        """For goodput."""
        return {"ttft": self.ttft_ms, "tpot": self.tpot_ms}


def rows(mix: Mix, rate: float, duration_s: float, seed: int) -> list[TraceRow]:
    """About `rate` requests a second, the first at 0 and the last at `duration_s`; no two prompts share a prefix."""
    generator = random.Random(f"{mix.name} {seed}")
    times = [0.0, *poisson_arrivals(round(rate * duration_s), duration_s, seed)]
    return [TraceRow(1000 * at, generator.randint(*mix.prompts), generator.randint(*mix.answers)) for at in times]


def offer(url: str, requests: Sequence[TraceRow], seed: int, concurrency: int | None = None) -> Report:
    """Send them at their times, or so many at once. `seed` chooses the tokens: a new one meets an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in requests))
        config = BenchConfig(
            url=url,
            workload=WorkloadOptions(workload="trace", trace=path, num_requests=len(requests), seed=seed),
            load=LoadOptions(concurrency=concurrency),
        )
        return asyncio.run(run(config))


def share_kept(metrics: Metrics) -> float:
    """Of all requests, the failed ones too."""
    assert metrics.request_goodput is not None
    return metrics.request_goodput * metrics.duration_s / max(metrics.completed + metrics.failed, 1)


def unloaded(url: str, mix: Mix, seed: int) -> Targets:
    """Medians of requests that are alone, times the factors. The first request warms up and is left out."""
    requests = rows(mix, rate=1.0, duration_s=_NUM_ALONE, seed=seed)
    records = offer(url, requests, seed, concurrency=1).records[1:]
    metrics = compute_metrics(records, 1.0, {})
    assert not metrics.failed
    assert metrics.ttft_ms is not None
    assert metrics.tpot_ms is not None
    return Targets(TTFT_FACTOR * metrics.ttft_ms.median, TPOT_FACTOR * metrics.tpot_ms.median)


def throughput(url: str, mix: Mix, seed: int) -> float:
    """Requests a second that are served while `_CONCURRENCY` are there, whatever that does to their times."""
    return offer(url, rows(mix, 1.0, 4.0 * _CONCURRENCY, seed), seed, _CONCURRENCY).metrics.request_throughput


def capacity(url: str, mix: Mix, targets: Targets, most: float, duration_s: float, seed: int) -> float:
    """Requests a second, up to `most`, of which `ENOUGH_KEPT` keep both targets: a few steps of bisection."""
    low, high = _LEAST_SHARE * most, most
    for probe in range(_NUM_PROBES):
        rate, probe_seed = (low + high) / 2, seed + probe
        records = offer(url, rows(mix, rate, duration_s, probe_seed), probe_seed).records
        enough = share_kept(compute_metrics(records, duration_s, targets.limits_ms)) >= ENOUGH_KEPT
        low, high = (rate, high) if enough else (low, rate)
    return low
