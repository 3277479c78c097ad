"""Supervisor: keeps the children of one launcher running, and stops them in order.

start     all children at once
a death   restart after a growing delay (RestartPolicy); a configuration that cannot work, or three deaths before
          the first readiness, end the server with the child's last words
stop      SIGTERM to the gateway, which finishes its requests; then SIGTERM to the workers; each wait is bounded
          and ends in SIGKILL
stop!     a second signal: one more SIGTERM to the gateway, which tells its open streams that they end; then
          SIGKILL to all
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

from ..core.config import GatewayConfig
from ..core.errors import BatonError, ConfigurationError
from .child import EXIT_CONFIGURATION
from .child_process import ChildProcess, ChildSpec
from .restart_policy import RestartPolicy

DRAIN_MARGIN_S = 5.0  # what a gateway may take beyond its own bound for running requests
WORKER_DRAIN_S = 5.0
CUT_S = 1.0  # for a gateway to tell its open streams that they are cut
KILL_WAIT_S = 5.0

WriteLine = Callable[[str], None]


class Supervisor:
    """`run` returns after a clean stop and raises BatonError when the server cannot go on."""

    def __init__(self, specs: Sequence[ChildSpec], write_line: WriteLine):
        self._specs = specs
        self._write_line = write_line
        self._children: dict[str, ChildProcess] = {}
        self._policies = {spec.name: RestartPolicy() for spec in specs}
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items() if child.pid is not None}

    def request_stop(self) -> None:
        """Drain the first time, kill the second time. Called from signal handlers of the event loop."""
        if self._stop.is_set():
            self._stop_now.set()
        else:
            self._stop.set()
            self._write_line("stopping: running requests are finished first; press Ctrl-C again to stop at once")

    async def run(self, when_started: Callable[[], Awaitable[None]]) -> None:
        """Run all children until a stop is requested. `when_started` runs beside them: it waits for readiness."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP so that the server outlives its terminal; that stays.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self.request_stop)
        keepers = {spec.name: asyncio.create_task(self._keep(spec)) for spec in self._specs}
        starter = asyncio.create_task(self._announce(when_started))
        stop = asyncio.create_task(self._stop.wait())
        try:
            await self._until_stop([*keepers.values(), starter], stop)
        finally:
            self._stop.set()
            starter.cancel()
            await self._shut_down(keepers)
            await asyncio.gather(starter, stop, return_exceptions=True)

    async def _until_stop(self, tasks: list[asyncio.Task[None]], stop: asyncio.Task[bool]) -> None:
        pending: set[asyncio.Task[None] | asyncio.Task[bool]] = {*tasks, stop}
        while stop in pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task  # raises what ended it

    async def _announce(self, when_started: Callable[[], Awaitable[None]]) -> None:
        await when_started()
        for policy in self._policies.values():
            policy.on_ready()

    async def _keep(self, spec: ChildSpec) -> None:
        policy = self._policies[spec.name]
        while not self._stop.is_set():
            child = self._children[spec.name] = ChildProcess(spec, self._write_line)
            await child.start()
            policy.on_start(time.monotonic())
            if self._stop.is_set():
                child.terminate()  # the stop came while it was being started
            code = await child.wait()
            if self._stop.is_set():
                return
            delay = self._judge(child, code, policy)
            self._write_line(f"{spec.name} ended ({describe_exit(code)}); it starts again in {delay:.1f} s")
            await _wait_at_most(self._stop, delay)

    def _judge(self, child: ChildProcess, code: int, policy: RestartPolicy) -> float:
        """Seconds until the restart. Raises when there is no point in one."""
        name = child.spec.name
        if code == EXIT_CONFIGURATION:
            raise ConfigurationError(f"{name} cannot run: {child.tail[-1] if child.tail else 'it gave no reason'}")
        delay = policy.on_death(time.monotonic())
        if delay is None:
            words = "\n  ".join(child.tail) or "(it said nothing)"
            raise BatonError(
                f"{name} ended {policy.num_deaths} times before it was ready ({describe_exit(code)}). "
                f"Its last words:\n  {words}"
            )
        return delay

    async def _shut_down(self, keepers: dict[str, asyncio.Task[None]]) -> None:
        """The gateway first, so that no request is cut while its workers still run."""
        gateways = [spec.name for spec in self._specs if spec.is_gateway]
        workers = [spec.name for spec in self._specs if not spec.is_gateway]
        drain_s = max(
            (s.config.drain_timeout_s for s in self._specs if isinstance(s.config, GatewayConfig)), default=0.0
        )
        for names, bound in ((gateways, drain_s + DRAIN_MARGIN_S), (workers, WORKER_DRAIN_S)):
            for name in names:
                if name in self._children:
                    self._children[name].terminate()
            await self._wait_gone([keepers[name] for name in names], bound)
            if self._stop_now.is_set():
                break
        if self._stop_now.is_set():
            await self._cut_off({name: keepers[name] for name in gateways})
        for child in self._children.values():
            child.kill()
        if left := [task for task in keepers.values() if not task.done()]:
            await asyncio.wait(left, timeout=KILL_WAIT_S)
        # One that failed has told its reason already, through `run`.
        await asyncio.gather(*(task for task in keepers.values() if task.done()), return_exceptions=True)

    async def _cut_off(self, gateways: dict[str, asyncio.Task[None]]) -> None:
        """Those that still run get their second signal and CUT_S to act on it."""
        left = {name: task for name, task in gateways.items() if not task.done() and name in self._children}
        for name in left:
            self._children[name].terminate()
        if left:
            await asyncio.wait(left.values(), timeout=CUT_S)

    async def _wait_gone(self, tasks: list[asyncio.Task[None]], bound_s: float) -> None:
        """Until all have ended, the bound is over, or a second signal says: now."""
        if not tasks:
            return
        gone = asyncio.create_task(_until_all_end(tasks))
        hurry = asyncio.create_task(self._until_hurry())
        await asyncio.wait([gone, hurry], timeout=bound_s, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        hurry.cancel()

    async def _until_hurry(self) -> None:
        await self._stop_now.wait()


async def _until_all_end(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)  # unlike gather, it leaves them alone when it is cancelled itself


def describe_exit(code: int) -> str:
    """`signal SIGKILL` or `exit code 1`."""
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
