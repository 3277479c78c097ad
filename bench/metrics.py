"""From request records to figures, defined as in `vllm bench serve` so that both tools' numbers compare.

Throughputs divide by the whole duration of the load; failed requests add to the duration, not to the sums.
"""

from collections.abc import Mapping, Sequence

import msgspec

from ..core.errors import ConfigurationError
from ..core.latency import GOODPUT_METRICS, Distribution, distribution_ms, keeps_limits
from .record import RequestRecord


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
