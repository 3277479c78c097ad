"""RoleTable: which roles each worker has, who changed them and why; by hand (`POST /roles`) or elastically.

A worker is told with SetRoles and answers with a Status. Until then it counts as having what it was asked to have. The
decode role is the one that a fleet cannot do without. It is taken from a worker only while another one has it *for
sure*: has said so and was not asked to give it up. However many changes are made at once, by hand and by the rule, the
last of them that would be too much is refused.

That holds for one gateway. Two may each take it from another worker in the same moment, and a worker may die just when
the only other one has lost it. So whenever nobody in the fleet has it, those that were started with it get it back.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ..core.errors import RequestError
from ..core.messages import Message, NodeRef, Role, SetRoles, Status, WorkerInfo
from .elastic import RoleChange
from .membership import Membership, Worker
from .metrics import Metrics

CONFIRM_TIMEOUT_S = 5.0
FORGET_S = 60.0  # an answer that has not come by then is lost: the message was, with its connection
_REMEMBERED_ROLES = 256  # of workers that left
_REMEMBERED_CHANGES = 50

# By the time and the roles of each worker, those that can best take more work first: a change to be made, or none.
RoleRule = Callable[[float, Mapping[NodeRef, tuple[Role, ...]]], RoleChange | None]

logger = logging.getLogger(__name__)


class RoleTable:
    """A listener of the cluster. `rule` None: roles change by hand only."""

    def __init__(
        self,
        membership: Membership,
        send: Callable[[NodeRef, Message], bool],
        metrics: Metrics,
        rule: RoleRule | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._membership = membership
        self._send = send
        self._metrics = metrics
        self._rule = rule
        self._clock = clock
        self._asked: dict[NodeRef, tuple[tuple[Role, ...], float]] = {}  # what it was told, and when
        self._changes: deque[dict[str, object]] = deque(maxlen=_REMEMBERED_CHANGES)
        self._last_roles: dict[str, tuple[NodeRef, tuple[Role, ...]]] = {}  # name |-> its last life, and what that said
        self._told = asyncio.Event()  # a worker said something of itself, or left

    # ---- what the HTTP side calls ---------------------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        """The body of /roles: worker |-> roles now, and the last changes, newest last, `at` in Unix seconds."""
        workers = sorted(self._membership.workers.values(), key=lambda worker: worker.info.ref.node_id)
        return {
            "workers": {worker.info.ref.node_id: list(worker.roles) for worker in workers},
            "elastic": self._rule is not None,
            "changes": self.changes,
        }

    @property
    def changes(self) -> list[dict[str, object]]:
        """The last ones, newest last."""
        return list(self._changes)

    async def change(self, node_id: str, roles: Sequence[Role]) -> None:
        """Returns when the worker has said that it has these roles.

        Raises RequestError: 400 for no role, 404 for a worker that is not here, 409 for what would leave no decode
        worker, 503 for a worker that does not answer.
        """
        wanted = tuple(role for role in Role if role in roles)
        worker = self._worker(node_id)
        if not wanted:
            raise RequestError(f"{node_id} must keep at least one role: prefill, decode or both", "roles")
        ref = worker.info.ref
        if not self._leaves_decode(ref, wanted):
            raise RequestError(
                f"{node_id} is the last worker that has the decode role for certain; give it to another one first, and "
                "wait until GET /roles shows it",
                "roles",
                status=409,
            )
        self._tell(RoleChange(ref, wanted, "by hand"))
        await self._confirmed(ref, wanted)

    def _worker(self, node_id: str) -> Worker:
        by_name = {ref.node_id: worker for ref, worker in self._membership.workers.items()}
        if node_id not in by_name:
            known = ", ".join(sorted(by_name)) or "none"
            raise RequestError(f"there is no worker {node_id[:100]!r}; there are: {known}", "worker", status=404)
        return by_name[node_id]

    async def _confirmed(self, ref: NodeRef, wanted: tuple[Role, ...]) -> None:
        try:
            async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                while (worker := self._membership.workers.get(ref)) is not None and worker.roles != wanted:
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            raise RequestError(
                f"{ref.node_id} has not answered within {CONFIRM_TIMEOUT_S:g} s; it may be in a long step and change "
                "its roles after it: GET /roles tells",
                status=503,
            ) from None
        if worker is None:
            raise RequestError(f"{ref.node_id} has just left; ask again when it is back", "worker", status=503)

    # ---- listener -------------------------------------------------------------------------------------------------

    def worker_joined(self, info: WorkerInfo) -> None:
        """It begins with the roles it was started with, whatever an earlier life of it was given."""
        life, before = self._last_roles.get(info.ref.node_id, (info.ref, info.roles))
        if life != info.ref and before != info.roles:
            reason = "it was started anew, and begins with the roles it was started with"
            self._note(info.ref.node_id, before, info.roles, reason)

    def worker_left(self, info: WorkerInfo) -> None:
        self._asked.pop(info.ref, None)
        self._told.set()

    def handle(self, sender: NodeRef, body: Message) -> None:
        if isinstance(body, Status):
            if sender in self._asked and self._asked[sender][0] == body.roles:
                del self._asked[sender]
            self._remember(sender, body.roles)
            self._told.set()

    def tick(self, now: float) -> None:
        self._asked = {ref: asked for ref, asked in self._asked.items() if now - asked[1] < FORGET_S}
        self._restore_decode()
        if self._rule is None:
            return
        workers = sorted(self._membership.workers.values(), key=_load)
        masks = {worker.info.ref: self._roles_of(worker) for worker in workers}
        change = self._rule(now, masks)
        if change is not None and self._leaves_decode(change.worker, change.roles):
            self._tell(change)

    # ---- changes --------------------------------------------------------------------------------------------------

    def _roles_of(self, worker: Worker) -> tuple[Role, ...]:
        """As asked for, else as it said."""
        asked = self._asked.get(worker.info.ref)
        return worker.roles if asked is None else asked[0]

    def _leaves_decode(self, ref: NodeRef, wanted: tuple[Role, ...]) -> bool:
        """Does somebody surely have the decode role once `ref` has these?"""
        others = [worker for other, worker in self._membership.workers.items() if other != ref]
        return Role.DECODE in wanted or any(
            Role.DECODE in worker.roles and Role.DECODE in self._roles_of(worker) for worker in others
        )

    def _restore_decode(self) -> None:
        workers = list(self._membership.workers.values())
        if any(Role.DECODE in worker.roles or Role.DECODE in self._roles_of(worker) for worker in workers):
            return
        for worker in workers:
            if Role.DECODE in worker.info.roles:
                roles = tuple(role for role in Role if role is Role.DECODE or role in worker.roles)
                self._tell(RoleChange(worker.info.ref, roles, "no worker had the decode role any more"))

    def _remember(self, ref: NodeRef, roles: tuple[Role, ...]) -> None:
        if not roles:
            return
        self._last_roles.pop(ref.node_id, None)
        self._last_roles[ref.node_id] = ref, roles
        if len(self._last_roles) > _REMEMBERED_ROLES:
            del self._last_roles[next(iter(self._last_roles))]

    def _tell(self, change: RoleChange) -> None:
        old = self._roles_of(self._membership.workers[change.worker])
        if not self._send(change.worker, SetRoles(change.roles)):
            return  # it has been removed, which `worker_left` heard
        self._asked[change.worker] = change.roles, self._clock()
        if change.roles == old:
            return
        self._note(change.worker.node_id, old, change.roles, change.reason)

    def _note(self, name: str, old: tuple[Role, ...], new: tuple[Role, ...], reason: str) -> None:
        words = ["+".join(roles) for roles in (old, new)]
        logger.info("roles of %s: %s -> %s: %s", name, *words, reason)
        self._metrics.roles_changed()
        self._changes.append({"at": time.time(), "worker": name, "old": words[0], "new": words[1], "reason": reason})


def _load(worker: Worker) -> tuple[int, int, str]:
    """Who can best take more work comes first."""
    status = worker.status
    running = status.num_running + status.num_waiting if status else 0
    return (status.num_waiting_tokens if status else 0, running, worker.info.ref.node_id)
