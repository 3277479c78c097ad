"""From request records to figures, defined as in `vllm bench serve` so that both tools' numbers compare.

TTFT, TPOT and E2EL have one value per successful request, ITL one per gap between chunks, pooled over requests.
Throughputs divide by the whole duration of the load; failed requests add to the duration, not to the sums.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..core.errors import ConfigurationError
from .record import RequestRecord

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


class Distribution(msgspec.Struct, frozen=True):
    """Milliseconds. Percentiles interpolate linearly between the two nearest samples (numpy's default)."""

    mean: float
    median: float
    p90: float
    p95: float
    p99: float


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one load. A distribution is None when nothing was measured; goodput when no limit was given."""

    completed: int
    failed: int
    duration_s: float
    total_input_tokens: int
    total_cached_tokens: int
    total_output_tokens: int
    request_throughput: float  # requests/s
    request_goodput: float | None  # requests/s that kept every limit
    output_throughput: float  # tokens/s
    total_token_throughput: float  # input + output tokens/s
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None
    max_send_lag_ms: float | None  # how late the load generator itself was, in an open loop


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
    return Distribution(
        mean=sum(ordered) / len(ordered),
        median=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
    )


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]` as {metric: milliseconds}. Raises ConfigurationError for anything else."""
    parsed: dict[str, float] = {}
    for limit in limits:
        name, _, value = limit.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = -1.0
        if name not in GOODPUT_METRICS or not 0 <= milliseconds < float("inf"):
            raise ConfigurationError(
                f"--goodput {limit}: each limit is METRIC:MILLISECONDS with METRIC one of "
                f"{', '.join(GOODPUT_METRICS)}, for example ttft:500 tpot:50"
            )
        parsed[name] = milliseconds
    return parsed


def keeps_limits(record: RequestRecord, limits_ms: Mapping[str, float]) -> bool:
    """Whether a successful request kept every limit; a single-token answer has a TPOT of 0 here."""
    measured = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(measured[name] * 1000 <= limit for name, limit in limits_ms.items())


def compute_metrics(records: Sequence[RequestRecord], duration_s: float, limits_ms: Mapping[str, float]) -> Metrics:
    """All figures of a load that took `duration_s` > 0 seconds; `limits_ms` as of `parse_goodput`."""
    good = [record for record in records if record.error is None]
    num_input = sum(record.prompt_tokens for record in good)
    num_output = sum(record.output_tokens for record in good)
    kept = sum(keeps_limits(record, limits_ms) for record in good)
    lags = [r.send_s - r.scheduled_s for r in records if r.scheduled_s is not None]
    return Metrics(
        completed=len(good),
        failed=len(records) - len(good),
        duration_s=duration_s,
        total_input_tokens=num_input,
        total_cached_tokens=sum(record.cached_tokens for record in good),
        total_output_tokens=num_output,
        request_throughput=len(good) / duration_s,
        request_goodput=kept / duration_s if limits_ms else None,
        output_throughput=num_output / duration_s,
        total_token_throughput=(num_input + num_output) / duration_s,
        ttft_ms=distribution_ms(record.ttft_s for record in good),
        tpot_ms=distribution_ms(tpot for record in good if (tpot := record.tpot_s) is not None),
        itl_ms=distribution_ms(itl for record in good for itl in record.itls_s),
        e2el_ms=distribution_ms(record.e2el_s for record in good),
        max_send_lag_ms=max(lags) * 1000 if lags else None,
    )
