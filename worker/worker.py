"""The loop of a worker process: receive, let each role take a step, hand on, report.

One thread runs it. Signs of life come from a thread of their own (BeatThread), so a long forward pass is not death.

Every worker has both roles. Its mask says which of them gateways give it requests for; it binds the gateways and not
the worker: what was accepted, or was on its way when the mask changed, is served to its end.
"""

import logging
import time
from collections.abc import Callable, Mapping

from ..core.errors import ConfigurationError
from ..core.messages import (
    STATUS_INTERVAL_S,
    CacheSnapshotQuery,
    Drain,
    FlushCache,
    Flushed,
    Goodbye,
    Hello,
    LedgerQuery,
    LedgerReport,
    Refused,
    Role,
    SetRoles,
    Status,
    WhoAreYou,
)
from ..transfer.channels import Incoming
from .membership import Changes, Membership
from .role import WorkerRole
from .settings import settings_of
from .workbench import Workbench

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.2  # a bound on how late a lease or a signal is noticed while nothing arrives
SILENCE_BEFORE_WARNING_S = 10.0


class Worker:
    """One process's loop over its roles. `stop` may be called from a signal handler or another thread."""

    def __init__(
        self,
        bench: Workbench,
        membership: Membership,
        roles: Mapping[Role, WorkerRole],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._bench = bench
        self._clock = clock
        self._roles = roles
        self._mask = bench.config.roles
        bench.share.has_both_roles = len(self._mask) > 1
        self._membership = membership
        self._last_status: Status | None = None
        self._last_status_at = 0.0
        self._draining = False
        self._has_joined = False

    def stop(self) -> None:
        """Drain: finish what is running, take nothing new, then leave the loop."""
        self._draining = True

    def run(self) -> None:
        """Serve until drained. Raises ConfigurationError when a gateway refuses this worker."""
        self._bench.channels.broadcast_gateways(Hello(self._bench.info))
        busy = False
        started = self._clock()
        while not (self._draining and self.num_requests == 0):
            if not self._has_joined and self._clock() - started > SILENCE_BEFORE_WARNING_S:
                started = self._clock()
                logger.warning(
                    "no gateway answers at %s: check the address, and that the key file is that server's",
                    ", ".join(self._bench.config.network.join),
                )
            busy = self.turn(0.0 if busy else IDLE_POLL_S)
        self._bench.channels.broadcast_gateways(Goodbye())

    def turn(self, timeout_s: float) -> bool:
        """Once around the loop, waiting at most `timeout_s` for messages; True when there may be more to do."""
        read_at = self._clock()
        self._receive(timeout_s)
        if self._draining:
            self._drain_roles()
        steps = [role.step(self._clock()) for role in self._roles.values()]
        moved = self._hand_on(read_at)
        self._bench.reporter.report()
        busy = moved or any(steps)
        self._report_status(force=not busy)
        return busy

    @property
    def num_requests(self) -> int:
        """Requests known in any phase."""
        return sum(role.num_requests for role in self._roles.values())

    # ---- receive ---------------------------------------------------------------------------------------------

    def _receive(self, timeout_s: float) -> None:
        for incoming in self._bench.channels.poll(timeout_s):
            now = self._clock()
            self._apply(self._membership.handle(incoming.sender, incoming.body, now), now)
            self._answer(incoming)
            for event in self._bench.link.handle(incoming, now):
                for role in self._roles.values():
                    role.on_link_event(event, now)
            if self._membership.is_gateway(incoming.sender):
                for role in self._roles.values():
                    role.handle(incoming, now)
        # Here and not after the step: what came in during a long step is not silence.
        now = self._clock()
        self._apply(self._membership.expire(now), now)

    def _answer(self, incoming: Incoming) -> None:
        """What a gateway asks of the worker as a whole."""
        match incoming.body:
            case Refused(reason=reason):
                raise ConfigurationError(f"the gateway refused this worker: {reason}")
            case WhoAreYou():
                self._bench.channels.broadcast_gateways(Hello(self._bench.info))
            case LedgerQuery(query_id=query_id):
                self._report_status(force=True)  # the counters that go with this ledger
                self._bench.tell(incoming.sender, LedgerReport(query_id, self._bench.ledger(self.num_requests)))
            case FlushCache(query_id=query_id):
                num_blocks = self._bench.cache.flush()
                self._bench.reporter.report()
                self._bench.tell(incoming.sender, Flushed(query_id, num_blocks))
            case CacheSnapshotQuery():
                self._bench.tell(incoming.sender, self._bench.reporter.snapshot())
            case SetRoles(roles=roles):
                self._set_mask(roles)
            case Drain():
                self.stop()

    def _set_mask(self, roles: tuple[Role, ...]) -> None:
        """The answer is a Status to all gateways, also when nothing changes: whoever asked waits for it."""
        mask = tuple(role for role in Role if role in roles)
        if mask and mask != self._mask:
            logger.info("roles now: %s (before: %s)", "+".join(mask), "+".join(self._mask))
            self._mask = mask
            self._bench.share.has_both_roles = len(mask) > 1
        self._last_status = None
        self._report_status(force=True)

    def _apply(self, changes: Changes, now: float) -> None:
        for ref in changes.left:
            logger.info("peer %s left", ref.node_id)
            for event in self._bench.link.drop_peer(ref):
                for role in self._roles.values():
                    role.on_link_event(event, now)
            self._bench.channels.remove_peer(ref)
        for info in changes.joined:
            logger.debug("peer %s joined", info.ref.node_id)
            self._bench.channels.add_peer(info)
        for gateway in changes.lost_gateways:
            logger.warning("gateway %s is gone; its requests are dropped", gateway.node_id)
            for role in self._roles.values():
                role.gateway_lost(gateway)
        if changes.welcomed_by is not None:
            if not self._has_joined and not self._bench.config.network.run_dir:
                logger.info("joined %s", changes.welcomed_by.node_id)  # its own terminal has no start table
            self._has_joined = True
            self._bench.tell(changes.welcomed_by, self._bench.reporter.snapshot())
            self._last_status = None  # due again

    # ---- hand on, report -------------------------------------------------------------------------------------

    def _hand_on(self, read_at: float) -> bool:
        """Move hand-overs along; True when one of them changed a request.

        Leases are judged as of when messages were last read: after a long step, or a stopped process, the signs of
        life lie unread in the sockets.
        """
        events = self._bench.link.pump(read_at)
        for event in events:
            for role in self._roles.values():
                role.on_link_event(event, read_at)
        return bool(events)

    def _report_status(self, *, force: bool) -> None:
        """The load, when it changed: at once when the worker falls idle, else at most every STATUS_INTERVAL_S."""
        now = self._clock()
        if not force and now - self._last_status_at < STATUS_INTERVAL_S:
            return
        roles = list(self._roles.values())
        status = self._bench.status(
            num_waiting=sum(role.num_waiting for role in roles),
            num_running=sum(role.num_running for role in roles),
            num_waiting_tokens=sum(role.num_waiting_tokens for role in roles),
            num_preemptions=sum(role.num_preemptions for role in roles),
            settings=settings_of({role: self._roles[role].settings for role in self._mask}),
            peers=self._membership.peers,
            roles=self._mask,
        )
        if status != self._last_status:
            self._bench.channels.broadcast_gateways(status)
            self._last_status, self._last_status_at = status, now

    def _drain_roles(self) -> None:
        for role in self._roles.values():
            role.drain()
