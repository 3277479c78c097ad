"""The life of a batch as a table: which status may follow which. Pure; the time comes in.

validating ──▶ in_progress ──▶ finalizing ──▶ completed
    │  │           │   │
    │  └▶ failed   │   └──▶ expired      (validating may expire too, while the server is down)
    └──────────────┴──▶ cancelling ──▶ cancelled
"""

import msgspec

from ...core.errors import LocalProtocolError, RequestError
from .objects import Batch, Status

_NEXT = {
    Status.VALIDATING: {Status.FAILED, Status.IN_PROGRESS, Status.CANCELLING, Status.EXPIRED},
    Status.IN_PROGRESS: {Status.FINALIZING, Status.CANCELLING, Status.EXPIRED},
    Status.FINALIZING: {Status.COMPLETED},
    Status.CANCELLING: {Status.CANCELLED},
}
# Where a batch comes to rest when its work is over, done or not.
_END = {
    Status.VALIDATING: Status.EXPIRED,
    Status.IN_PROGRESS: Status.EXPIRED,
    Status.FINALIZING: Status.COMPLETED,
    Status.CANCELLING: Status.CANCELLED,
}


def is_over(status: Status) -> bool:
    """Nothing follows."""
    return status not in _NEXT


def moved(batch: Batch, status: Status, now: float) -> Batch:
    """The batch in its next status. Raises LocalProtocolError when that may not follow."""
    if status not in _NEXT.get(batch.status, ()):
        raise LocalProtocolError(f"batch {batch.id} cannot go from {batch.status} to {status}")
    return msgspec.structs.replace(batch, status=status, **{f"{status}_at": int(now)})


def cancelled(batch: Batch, now: float) -> Batch:
    """The batch as its client wants it; a second time is as good as the first. Raises RequestError (409)."""
    if batch.status in (Status.CANCELLING, Status.CANCELLED):
        return batch
    if Status.CANCELLING not in _NEXT.get(batch.status, ()):
        raise RequestError(f"this batch is {batch.status}: it cannot be cancelled any more", None, "not_running", 409)
    return moved(batch, Status.CANCELLING, now)


def end_of(status: Status) -> Status:
    """What a batch becomes whose lines are all done (finalizing) or will not be."""
    return _END[status]
