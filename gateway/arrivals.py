"""ArrivedTokens: what is counted for each token, as plain numbers of one thread; Prometheus reads them at a scrape."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_CLASSES = ("interactive", "batch")


class ArrivedTokens(Collector):
    """`bounds_s`: upper ends of the buckets for the time between two arrivals, ascending."""

    def __init__(self, bounds_s: Sequence[float]):
        self._bounds_s = bounds_s
        self._num_gaps = [0] * (len(bounds_s) + 1)  # bucket |-> gaps; the last has no upper end
        self._gaps_s = 0.0
        self._num_tokens = 0
        self._num_served = [0, 0]  # by class

    def arrived(self, num_tokens: int, gap_s: float | None) -> None:
        """`gap_s` since the tokens before; None for the first ones."""
        self._num_tokens += num_tokens
        if gap_s is not None:
            self._num_gaps[bisect_left(self._bounds_s, gap_s)] += 1
            self._gaps_s += gap_s

    def served(self, num_tokens: int, *, is_batch: bool) -> None:
        self._num_served[is_batch] += num_tokens

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily("baton_generation_tokens", "Tokens that came from workers.", value=self._num_tokens)
        bounds = [*map(floatToGoString, self._bounds_s), "+Inf"]
        yield HistogramMetricFamily(
            "baton_inter_token_latency_seconds",
            "Between two arrivals of tokens.",
            buckets=list(zip(bounds, accumulate(self._num_gaps), strict=True)),
            sum_value=self._gaps_s,
        )
        served = CounterMetricFamily(
            "baton_tokens_served", "Prompt tokens not cached, and tokens of answers.", labels=("class",)
        )
        for name, num_tokens in zip(_CLASSES, self._num_served, strict=True):
            served.add_metric((name,), num_tokens)
        yield served
