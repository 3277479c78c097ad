"""What the gateway's `GET /workers` says of the workers: what the start table shows beyond what the launcher decided.

A worker on a GPU knows the size of its pool only when it has loaded, and how KV travels is settled between the workers.
"""

import msgspec

from ..core.config import GatewayConfig, WorkerConfig
from .child_process import ChildSpec
from .start_table import TableRow

_TRANSPORT_NAMES = {
    "shared_memory": "shared memory",
    "cuda_ipc": "CUDA IPC",
    "pinned_memory": "pinned host memory",
    "nccl": "NCCL",
}
_SHORT_UUID = 12  # "GPU-1a2b3c4d"


class WorkerReport(msgspec.Struct, frozen=True):
    """The fields that are shown; see gateway/fleet.py."""

    id: str
    kv_tokens: int
    context_length: int
    transports: dict[str, str]  # peer |-> transport
    memory_note: str

    @property
    def transport(self) -> str:
        """`CUDA IPC`; several where pairs differ, "-" for a worker that hands nothing over."""
        names = {_TRANSPORT_NAMES.get(name, name) for name in self.transports.values()}
        return ", ".join(sorted(names)) or "-"


class _Answer(msgspec.Struct):
    workers: list[WorkerReport]


def read_reports(body: str) -> dict[str, WorkerReport]:
    """Worker id |-> report. Raises msgspec.DecodeError or msgspec.ValidationError for another answer."""
    return {report.id: report for report in msgspec.json.decode(body, type=_Answer).workers}


def table_row(spec: ChildSpec, pid: int, report: WorkerReport | None) -> TableRow:
    """`report` None: the worker left between its readiness and the table."""
    match spec.config:
        case GatewayConfig():
            return TableRow(spec.name, pid)
        case WorkerConfig(engine=engine, device_name=name, device_uuid=uuid):
            device = f"{name} {uuid[:_SHORT_UUID]}" if uuid else engine.device
            tokens = f"{report.kv_tokens:,}" if report else "-"
            return TableRow(spec.name, pid, device, str(engine.threads), tokens, report.transport if report else "-")


def memory_lines(reports: dict[str, WorkerReport]) -> list[str]:
    """The arithmetic of the pools that were measured, and the context that they leave."""
    lines = []
    for report in reports.values():
        first, *rest = report.memory_note.splitlines() or [""]
        if first:
            lines += [
                f"{report.id} (context {report.context_length:,} tokens): {first}",
                *(f"  {line}" for line in rest),
            ]
    return lines
