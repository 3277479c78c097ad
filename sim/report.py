"""The figures of a simulated load, by the definitions of core/latency.py."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from ..core.latency import Distribution, counted_distribution_ms, distribution_ms, keeps_limits
from .record import SimRecord
from .simulation import SimResult


class Window(msgspec.Struct, frozen=True):
    """Requests by when they arrived. `goodput`: those that kept every limit, per second; refused ones missed."""

    start_s: float
    arrived: int
    refused: int
    kept: int
    attainment: float  # kept / arrived
    goodput: float


class SimReport(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution is None when nothing was measured; rates are per second of the whole run."""

    completed: int
    refused: dict[str, int]  # HTTP status |-> requests
    virtual_s: float
    request_throughput: float
    request_goodput: float
    attainment: float  # requests that kept every limit / requests that arrived
    output_throughput: float
    cached_share: float  # of the prompt tokens of completed requests
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None
    num_preemptions: int
    kv_gb_sent: float
    utilisation: dict[str, float]  # worker |-> share of the run in which its device computed
    windows: list[Window]
    real_s: float

    @property
    def speed(self) -> float:
        """Virtual seconds per real second."""
        return self.virtual_s / self.real_s


def report(result: SimResult, limits_ms: Mapping[str, float], window_s: float) -> SimReport:
    """`limits_ms` as of `keeps_limits`: {"ttft": 500, "tpot": 50}; without any, every complete answer keeps them."""
    records = result.records
    complete = [record for record in records if record.status == 200]
    kept = sum(keeps_limits(record, limits_ms) for record in complete)
    prompt_tokens = sum(record.prompt_tokens for record in complete)
    span_s = result.virtual_s or 1.0
    return SimReport(
        completed=len(complete),
        refused={str(s): n for s, n in sorted(Counter(r.status for r in records if r.status != 200).items())},
        virtual_s=result.virtual_s,
        request_throughput=len(complete) / span_s,
        request_goodput=kept / span_s,
        attainment=kept / len(records) if records else 0.0,
        output_throughput=sum(record.output_tokens for record in complete) / span_s,
        cached_share=sum(record.cached_tokens for record in complete) / prompt_tokens if prompt_tokens else 0.0,
        ttft_ms=distribution_ms(record.ttft_s for record in complete),
        tpot_ms=distribution_ms(tpot for record in complete if (tpot := record.tpot_s) is not None),
        itl_ms=counted_distribution_ms(result.gaps),
        e2el_ms=distribution_ms(record.e2el_s for record in complete),
        num_preemptions=result.num_preemptions,
        kv_gb_sent=result.num_kv_bytes / 1e9,
        utilisation={name: busy_s / span_s for name, busy_s in result.busy_s.items()},
        windows=windows(records, limits_ms, window_s),
        real_s=result.real_s,
    )


def windows(records: Sequence[SimRecord], limits_ms: Mapping[str, float], window_s: float) -> list[Window]:
    """Attainment over time, windows without arrivals left out."""
    by_window: dict[int, list[SimRecord]] = {}
    for record in records:
        by_window.setdefault(int(record.arrived_s / window_s), []).append(record)
    found = []
    for number, arrived in sorted(by_window.items()):
        complete = [record for record in arrived if record.status == 200]
        kept = sum(keeps_limits(record, limits_ms) for record in complete)
        found.append(
            Window(
                start_s=number * window_s,
                arrived=len(arrived),
                refused=len(arrived) - len(complete),
                kept=kept,
                attainment=kept / len(arrived),
                goodput=kept / window_s,
            )
        )
    return found
