"""SimWorker: the loop of worker/worker.py in virtual time: receive, let each role take a step, report.

A turn is an event. On a device that overlaps it takes no time but that of launching; the next one comes when a step
ends or a message arrives. Else the device is the loop's own processor, and the loop stands still while a step runs:
what comes in meanwhile is read after it. A role's step is a generator of the times until which the loop stands still.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from ..core.messages import STATUS_INTERVAL_S, Message, NodeRef, Role, SetRoles, Status
from ..worker.settings import settings_of
from .answers import Answers
from .decode_role import SimDecodeRole
from .prefill_role import SimPrefillRole
from .workbench import SimWorkbench, WorkerParts


class SimRole(Protocol):
    """As worker/role.py, but that a step is a generator."""

    @property
    def num_requests(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting_tokens(self) -> int: ...

    @property
    def settings(self) -> dict[str, int]: ...

    @property
    def is_busy(self) -> bool:
        """The device computes for it."""

    def step(self) -> Iterator[float]:
        """One plan, launch, collect. Yields the times until which the loop stands still."""

    def handle(self, sender: NodeRef, message: Message) -> None:
        """Take a message; one that is another role's is ignored."""


class SimWorker:
    """One worker with both roles; `roles` are those that the gateway gives it requests for."""

    def __init__(self, parts: WorkerParts, answers: Answers):
        self.bench = SimWorkbench(parts, self._put, self.wake)
        self.ref = parts.info.ref
        self.roles = parts.info.roles
        self.bench.share.has_both_roles = len(self.roles) > 1
        self.prefill = SimPrefillRole(self.bench, parts.prefill)
        self.decode = SimDecodeRole(self.bench, parts.decode, answers)
        self._both: tuple[SimRole, ...] = (self.prefill, self.decode)
        self._clock = parts.clock
        self._unread: list[Callable[[], None]] = []
        self._turn: Iterator[float] | None = None  # the one that stands still
        self._turn_is_due = False
        self._has_launched = False  # in the last turn: there may be room for one more step behind that one
        self._last_status: Status | None = None
        self._last_status_at = 0.0

    @property
    def num_requests(self) -> int:
        """Requests known in any phase."""
        return sum(role.num_requests for role in self._both)

    def handle(self, sender: NodeRef, message: Message) -> None:
        """A message has arrived."""
        self._put(lambda: self._handle(sender, message))

    def _put(self, action: Callable[[], None]) -> None:
        self._unread.append(action)
        self.wake()

    def _handle(self, sender: NodeRef, message: Message) -> None:
        if isinstance(message, SetRoles):
            self.roles = message.roles
            self.bench.share.has_both_roles = len(message.roles) > 1
            self._report_status(force=True)
        for role in self._both:
            role.handle(sender, message)

    def calibrate(self) -> None:
        """Know what steps cost before there are requests, and tell the gateway."""
        self.bench.calibrate()
        self._report_status(force=True)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something happened: a turn is due once everything else of this instant has happened too, and the host has
        launched what it is launching.
        """
        if not self._turn_is_due and self._turn is None:
            self._turn_is_due = True
            self._clock.at(self.bench.host_free_at, self._begin)

    def _begin(self) -> None:
        self._turn_is_due = False
        self._turn = self._take_turn()
        self._go_on()

    def _go_on(self) -> None:
        """Until the loop stands still, or the turn is over."""
        assert self._turn is not None
        until = next(self._turn, None)
        if until is not None:
            self._clock.at(until, self._go_on)
            return
        self._turn = None
        if self._unread or self._has_launched:
            self.wake()

    def _take_turn(self) -> Iterator[float]:
        """Once around the loop."""
        unread, self._unread = self._unread, []
        for action in unread:
            action()
        num_steps = self.bench.num_steps
        if self.prefill.num_requests or self.prefill.is_busy:
            yield from self.prefill.step()
        yield from self.decode.step()
        self.bench.report()
        self._has_launched = self.bench.num_steps > num_steps
        self._report_status(force=not self._has_launched and not any(role.is_busy for role in self._both))

    def _report_status(self, *, force: bool) -> None:
        """The load, when it changed: at once when the worker falls idle, else at most every STATUS_INTERVAL_S."""
        now = self._clock.now
        if not force and now - self._last_status_at < STATUS_INTERVAL_S:
            return
        status = self._status()
        if status != self._last_status:
            self._last_status, self._last_status_at = status, now
            self.bench.tell_gateway(status)

    def _status(self) -> Status:
        bench, both = self.bench, self._both
        drivers: dict[Role, SimRole] = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        states, num_sent = bench.blocks.cache.pool.counts(), bench.network.wire(bench.ref).bytes_sent
        return Status(
            num_waiting=sum(role.num_waiting for role in both),
            num_running=sum(role.num_running for role in both),
            num_waiting_tokens=sum(role.num_waiting_tokens for role in both),
            free_blocks=states.free,
            reserved_blocks=states.reserved,
            private_blocks=states.private,
            cached_blocks=states.cached,
            quarantined_blocks=states.quarantined,
            available_blocks=bench.blocks.cache.num_available,
            num_tokens_computed=bench.num_prompt_tokens,
            num_tokens_generated=bench.num_tokens_generated,
            num_preemptions=self.decode.scheduler.num_preemptions,
            num_kv_bytes_sent=num_sent,
            num_kv_bytes_received=0,  # the network counts what is sent
            num_handover_failures=0,
            step_cost=bench.steps.learned,
            steps=bench.steps.totals,
            settings=settings_of({role: drivers[role].settings for role in self.roles}),
            roles=self.roles,
        )
