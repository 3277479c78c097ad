"""What `GET /workers` tells of the workers: what each said of itself, and how KV travels between them. Pure."""

from collections.abc import Sequence

from .membership import Worker


def describe_fleet(workers: Sequence[Worker]) -> list[dict[str, object]]:
    """One entry a worker, by name. `transports`: peer |-> how KV goes between the two, as its receiver last said."""
    transports: dict[str, dict[str, str]] = {worker.info.ref.node_id: {} for worker in workers}
    for worker in workers:
        receiver = worker.info.ref.node_id
        for sender, transport in worker.status.transports.items() if worker.status else ():
            transports[receiver][sender] = transport
            transports.setdefault(sender, {})[receiver] = transport
    return [_describe(worker, transports[worker.info.ref.node_id]) for worker in sorted(workers, key=_by_name)]


def _describe(worker: Worker, transports: dict[str, str]) -> dict[str, object]:
    info = worker.info
    return {
        "id": info.ref.node_id,
        "roles": list(info.roles),
        "pid": info.pid,
        "device": info.device,
        "threads": info.threads,
        "kv_tokens": worker.pool_tokens,
        "context_length": info.context_length,
        "max_running": info.max_running,
        "transports": transports,
        "memory_note": info.memory_note,
    }


def _by_name(worker: Worker) -> str:
    return worker.info.ref.node_id
