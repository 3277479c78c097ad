"""What /metrics shows, in a registry of its own. Labels are roles, worker names and fixed words: never client text.

Whatever goes wrong in here is logged and stays here: a request never fails because it could not be counted.
"""

import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..core.timeline import Station, Timeline
from .arrivals import ArrivedTokens
from .membership import Worker
from .worker_metrics import WorkerCollector

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_M = TypeVar("_M", bound="Metrics")

# Seconds. Wide enough for a laptop's CPU and fine enough for a GPU.
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 400)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
_E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_RATIO_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 4, 8)
_STAGE_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def _isolated(method: Callable[Concatenate[_M, _P], None]) -> Callable[Concatenate[_M, _P], None]:
    """A failure of `method` is logged, not raised."""

    def wrapper(self: _M, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:  # whatever it is, the request goes on
            logger.exception("a measurement was lost")

    return wrapper


def _class(is_batch: bool) -> str:
    return "batch" if is_batch else "interactive"


class Metrics:
    """All series of one gateway. `workers` is read at each scrape."""

    def __init__(self, workers: Callable[[], list[Worker]]):
        self._registry = CollectorRegistry(auto_describe=True)
        self._ttft = self._histogram("time_to_first_token_seconds", "Request to first token.", _TTFT_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From the request to its end.", _E2E_BUCKETS)
        self._copy = self._histogram("handover_copy_seconds", "Copying and checking KV of a request.", _STAGE_BUCKETS)
        self._message = self._histogram("handover_message_seconds", "Commit, sent to read.", _STAGE_BUCKETS)
        self._stage = Histogram(
            "baton_stage_seconds",
            "From one station of a request to the next; they add up to the time to first token.",
            ("stage",),
            buckets=_STAGE_BUCKETS,
            registry=self._registry,
        )
        self._routed = self._counter("routed", "Requests by where their prompt is computed.", "way")
        self._predicted = self._histogram(
            "ttft_prediction_ratio", "Dispatch to first token, measured over predicted.", _RATIO_BUCKETS
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests.")
        self._cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the caches.")
        self._cache_hits = self._counter("prefix_cache_hits", "Prompt tokens that no worker computed.")
        self._retries = self._counter("request_retries", "Requests that were sent once more.")
        self._finished = self._counter("request_finished", "Answers by how they ended.", "finished_reason")
        self._responses = self._counter("http_responses", "HTTP responses.", "status_class")
        self._refused = self._counter("requests_refused", "Requests that got no worker.", "reason")
        self._role_changes = self._counter("role_changes", "Roles of workers that were changed at run time.")
        self._batch_lines = self._counter("batch_lines", "Lines of batches by how they ended.", "outcome")
        self._queue_length = self._gauge("queue_length", "Requests that wait for credit.", "class")
        self._queue_wait = Histogram(
            "baton_request_queue_time_seconds",
            "From the request to its first dispatch.",
            ("class",),
            buckets=_STAGE_BUCKETS,
            registry=self._registry,
        )
        self._in_flight = Gauge("baton_gateway_requests", "Requests here.", ("state",), registry=self._registry)
        self.tokens = ArrivedTokens(_ITL_BUCKETS)
        self._registry.register(self.tokens)
        self._registry.register(WorkerCollector(workers))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"baton_{name}", text, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"baton_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"baton_{name}", text, labels, registry=self._registry)

    @_isolated
    def first_token(self, timeline: Timeline) -> None:
        """The first token of an answer is about to be written to the client."""
        for start, end, duration_ns in timeline.stages():
            self._stage.labels(f"{start}_to_{end}").observe(duration_ns / 1e9)
        # Both stamps are this process's own, whatever host the workers are on.
        self._ttft.observe((timeline.stamps[Station.FIRST_CHUNK] - timeline.stamps[Station.RECEIVED]) / 1e9)
        if timeline.copy_ns:
            self._copy.observe(timeline.copy_ns / 1e9)
            self._message.observe(timeline.message_ns / 1e9)

    @_isolated
    def routed(self, way: str) -> None:
        """A request was sent out. `way`: remote, local, returned (gateway/router.py)."""
        self._routed.labels(way).inc()

    @_isolated
    def ttft_predicted(self, ratio: float) -> None:
        """A first token has come; its time since the dispatch was `ratio` times the predicted one."""
        self._predicted.observe(ratio)

    @_isolated
    def answered(self, num_prompt_tokens: int, num_cached_tokens: int, seconds: float, finished_reason: str) -> None:
        """One choice has ended; `finished_reason` is stop, length, abort or error."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cache_queries.inc(num_prompt_tokens)
        self._cache_hits.inc(num_cached_tokens)
        self._e2e.observe(seconds)
        self._finished.labels(finished_reason).inc()

    @_isolated
    def responded(self, status: int) -> None:
        self._responses.labels(f"{status // 100}xx").inc()

    @_isolated
    def queued(self, seconds: float, *, is_batch: bool) -> None:
        """A request is sent out for the first time; it has waited for `seconds`."""
        self._queue_wait.labels(_class(is_batch)).observe(seconds)

    @_isolated
    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    @_isolated
    def retried(self) -> None:
        self._retries.inc()

    @_isolated
    def batch_line_ended(self, outcome: str) -> None:
        """`outcome`: completed, failed."""
        self._batch_lines.labels(outcome).inc()

    @_isolated
    def roles_changed(self) -> None:
        self._role_changes.inc()

    def render(self, num_in_flight: int, num_queued: int, num_batch_queued: int) -> bytes:
        """The text format of Prometheus. `num_queued` counts both classes."""
        self._in_flight.labels("running").set(num_in_flight)
        self._in_flight.labels("queued").set(num_queued)
        self._queue_length.labels(_class(is_batch=False)).set(num_queued - num_batch_queued)
        self._queue_length.labels(_class(is_batch=True)).set(num_batch_queued)
        text: Any = generate_latest(self._registry)
        return bytes(text)
