"""What workers say about themselves, as metrics: read from their last Status at each scrape."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.messages import Role, Status
from .membership import Worker

_LABELS = ("worker", "role")
_BLOCK_STATES = ("free", "reserved", "private", "cached", "quarantined")
_GAUGES = {
    "requests_running": ("num_running", "Requests the worker computes."),
    "requests_waiting": ("num_waiting", "Requests the worker has accepted and not begun."),
    "waiting_tokens": ("num_waiting_tokens", "Prompt tokens accepted and not yet computed."),
}
_COUNTERS = {
    "tokens_computed": ("num_tokens_computed", "Tokens that went through a forward pass."),
    "tokens_generated": ("num_tokens_generated", "Tokens sampled."),
    "preemptions": ("num_preemptions", "Sequences sent back to wait."),
    "kv_sent_bytes": ("num_kv_bytes_sent", "KV handed over to others."),
    "kv_received_bytes": ("num_kv_bytes_received", "KV handed over by others."),
    "handover_failures": ("num_handover_failures", "Hand-overs that ended in local computation."),
}


class WorkerCollector(Collector):
    """A worker that left is not shown any more, so its name cannot stay as a series for ever."""

    def __init__(self, workers: Callable[[], list[Worker]]):
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        reporting = [(_labels(worker), worker.status) for worker in self._workers() if worker.status is not None]
        for name, (field, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"baton_worker_{name}", text, labels=_LABELS)
            for labels, status in reporting:
                gauge.add_metric(labels, getattr(status, field))
            yield gauge
        for name, (field, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"baton_worker_{name}", text, labels=_LABELS)
            for labels, status in reporting:
                counter.add_metric(labels, getattr(status, field))
            yield counter
        yield from _tuning(reporting)
        yield from _steps(reporting)
        yield self._tuner_events()
        yield _blocks(reporting)
        yield _usage(reporting)
        yield self._alive()
        yield self._roles()

    def _tuner_events(self) -> Metric:
        events = CounterMetricFamily("baton_worker_tuner_changes", "Settings changed by tuners.", labels=_LABELS)
        for worker in self._workers():
            events.add_metric(_labels(worker), worker.num_tuner_events)
        return events

    def _alive(self) -> Metric:
        alive = GaugeMetricFamily("baton_worker_up", "Workers in the table.", labels=_LABELS)
        for worker in self._workers():
            alive.add_metric(_labels(worker), 1)
        return alive

    def _roles(self) -> Metric:
        roles = GaugeMetricFamily(
            "baton_worker_role_active", "Is it given requests for this role now?", labels=("worker", "active_role")
        )
        for worker in self._workers():
            for role in Role:
                roles.add_metric([worker.info.ref.node_id, role], role in worker.roles)
        return roles


def _tuning(reporting: list[tuple[list[str], Status]]) -> Iterable[Metric]:
    settings = GaugeMetricFamily(
        "baton_worker_setting", "Batch limits the worker runs with.", labels=(*_LABELS, "setting")
    )
    cost = GaugeMetricFamily(
        "baton_worker_step_cost_seconds", "Learned cost of a step, by term.", labels=(*_LABELS, "term")
    )
    error = GaugeMetricFamily(
        "baton_worker_step_cost_error_ratio", "Mean relative error of predicted step times.", labels=_LABELS
    )
    for labels, status in reporting:
        for name, value in status.settings.items():
            settings.add_metric([*labels, name.replace(" ", "_")], value)
        if status.step_cost is not None:
            for term in ("base", "per_prompt_token", "per_product", "per_decode", "per_context"):
                cost.add_metric([*labels, term], getattr(status.step_cost, f"{term}_s"))
            error.add_metric(labels, status.step_cost.relative_error)
    yield from (settings, cost, error)


def _steps(reporting: list[tuple[list[str], Status]]) -> Iterable[Metric]:
    """What a learned cost can be checked by: over any time, seconds = the sum of terms x their costs."""
    seconds = CounterMetricFamily("baton_worker_step_seconds", "Time of forward passes.", labels=_LABELS)
    work = CounterMetricFamily(
        "baton_worker_step_work", "Work of forward passes, by term of their cost.", labels=(*_LABELS, "term")
    )
    for labels, status in reporting:
        steps = status.steps
        seconds.add_metric(labels, steps.seconds)
        work.add_metric([*labels, "base"], steps.num_steps)
        work.add_metric([*labels, "per_prompt_token"], steps.num_prompt_tokens)
        work.add_metric([*labels, "per_product"], steps.prompt_products)
        work.add_metric([*labels, "per_decode"], steps.num_decodes)
        work.add_metric([*labels, "per_context"], steps.decode_context)
    yield from (seconds, work)


def _blocks(reporting: list[tuple[list[str], Status]]) -> Metric:
    blocks = GaugeMetricFamily("baton_worker_blocks", "KV blocks by state.", labels=(*_LABELS, "state"))
    for labels, status in reporting:
        for state in _BLOCK_STATES:
            blocks.add_metric([*labels, state], getattr(status, f"{state}_blocks"))
    return blocks


def _usage(reporting: list[tuple[list[str], Status]]) -> Metric:
    usage = GaugeMetricFamily(
        "baton_kv_cache_usage_ratio", "Part of the KV pool that running requests hold.", labels=_LABELS
    )
    for labels, status in reporting:
        total = sum(getattr(status, f"{state}_blocks") for state in _BLOCK_STATES)
        usage.add_metric(labels, (total - status.available_blocks) / total if total else 0.0)
    return usage


def _labels(worker: Worker) -> list[str]:
    return [worker.info.ref.node_id, "+".join(sorted(worker.info.roles))]
