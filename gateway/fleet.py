"""What `GET /workers` and `GET /tuner` tell of the workers: what each said of itself and of its steps. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from ..core.messages import NodeRef, Role
from .membership import Worker


def describe_fleet(
    workers: Sequence[Worker], backlogs: Mapping[NodeRef, Mapping[Role, float]]
) -> list[dict[str, object]]:
    """One entry a worker, by name. `transports`: peer |-> how KV goes between the two, as its receiver last said.

    `backlogs`: seconds until a prompt sent there now would be begun, by role; unknown while costs are.
    """
    transports: dict[str, dict[str, str]] = {worker.info.ref.node_id: {} for worker in workers}
    for worker in workers:
        receiver = worker.info.ref.node_id
        for sender, transport in worker.status.transports.items() if worker.status else ():
            transports[receiver][sender] = transport
            transports.setdefault(sender, {}).setdefault(receiver, transport)
    return [
        _describe(worker, transports[worker.info.ref.node_id], backlogs.get(worker.info.ref, {}))
        for worker in sorted(workers, key=_by_name)
    ]


def _describe(worker: Worker, transports: dict[str, str], backlog: Mapping[Role, float]) -> dict[str, object]:
    info = worker.info
    return {
        "id": info.ref.node_id,
        "roles": list(worker.roles),
        "pid": info.pid,
        "device": info.device,
        "threads": info.threads,
        "kv_tokens": worker.pool_tokens,
        "context_length": info.context_length,
        "max_running": info.max_running,
        "backlog_s": {role.value: round(seconds, 6) for role, seconds in backlog.items()},
        "transports": transports,
        "memory_note": info.memory_note,
    }


def describe_tuning(workers: Sequence[Worker], epoch: float) -> list[dict[str, object]]:
    """One entry a worker, by name. `step_cost`, `steps`: see core/step_cost.py; `is_learned`: tuners and the router go
    by the cost. Events: newest last, `at` in seconds since 1970; `epoch` is when the gateway's clock was 0.
    """
    return [
        {
            "id": worker.info.ref.node_id,
            "settings": worker.status.settings,
            "is_learned": worker.status.step_cost is not None and worker.status.step_cost.is_trusted,
            "step_cost": _fields(worker.status.step_cost) if worker.status.step_cost else None,
            "steps": _fields(worker.status.steps) if worker.status.steps else None,
            "num_events": worker.num_tuner_events,
            "events": [{**_fields(event), "at": round(epoch + event.at, 3)} for event in worker.tuner_events],
        }
        for worker in sorted(workers, key=_by_name)
        if worker.status is not None
    ]


def _fields(struct: msgspec.Struct) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _by_name(worker: Worker) -> str:
    return worker.info.ref.node_id
