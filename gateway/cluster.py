"""Cluster: the gateway's side of the message channel: receives, keeps the membership, beats, asks for reports."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Iterable
from typing import Protocol

from ..core.messages import (
    Beat,
    FlushCache,
    Flushed,
    Goodbye,
    Hello,
    LedgerQuery,
    LedgerReport,
    Message,
    NodeRef,
    WorkerInfo,
)
from ..transfer.wire import Incoming, PeerUnreachable
from .admission import TICK_INTERVAL_S
from .membership import Action, Joined, Left, Membership, Rejected, Send

BEAT_INTERVAL_S = 1.0
LEAST_BEAT_INTERVAL_S = 0.1  # however many connections end; and a socket is told of an end a little after its monitor
REPORT_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class Channel(Protocol):
    """What is needed of transfer's GatewayChannel."""

    disconnected: asyncio.Event  # set when a connection has ended, nobody knows whose

    async def receive(self) -> Incoming: ...

    def send(self, to: NodeRef, body: Message) -> None: ...

    def forget(self, ref: NodeRef) -> None: ...


class Listener(Protocol):
    """Who wants to know what happens in the cluster. None of these may wait."""

    def worker_joined(self, info: WorkerInfo) -> None: ...

    def worker_left(self, info: WorkerInfo) -> None: ...

    def handle(self, sender: NodeRef, body: Message) -> None:
        """A message of a worker that is in the table."""
        ...

    def tick(self, now: float) -> None:
        """Called every TICK_INTERVAL_S."""
        ...


class Cluster:
    """`run` serves until it is cancelled. `listeners` are told everything in their order."""

    def __init__(self, channel: Channel, membership: Membership):
        self._channel = channel
        self._membership = membership
        self._query_ids = itertools.count(1)
        self._reports: dict[tuple[NodeRef, int], asyncio.Future[LedgerReport | Flushed]] = {}
        self.listeners: list[Listener] = []

    def send(self, to: NodeRef, body: Message) -> bool:
        """Whether it went out. A worker that cannot be reached is removed, which the listeners hear at once."""
        try:
            self._channel.send(to, body)
        except PeerUnreachable as error:
            self._apply(self._membership.unreachable(to, str(error)))
            return False
        return True

    async def run(self) -> None:
        """The receive loop beside the clocks."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._beat())
            tasks.create_task(self._tick())

    async def ask_all(
        self, query: type[LedgerQuery] | type[FlushCache]
    ) -> dict[NodeRef, LedgerReport | Flushed | None]:
        """Every worker's answer; None for one that does not answer in time."""
        query_id = next(self._query_ids)
        loop = asyncio.get_running_loop()
        futures: dict[NodeRef, asyncio.Future[LedgerReport | Flushed]]
        futures = {ref: loop.create_future() for ref in self._membership.workers}
        self._reports |= {(ref, query_id): future for ref, future in futures.items()}
        try:
            for ref in futures:
                self.send(ref, query(query_id))
            if futures:
                await asyncio.wait(futures.values(), timeout=REPORT_TIMEOUT_S)
            return {ref: future.result() if future.done() else None for ref, future in futures.items()}
        finally:
            for ref in futures:
                del self._reports[ref, query_id]

    # ---- loops ----------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            incoming = await self._channel.receive()
            try:
                self._handle(incoming.sender, incoming.body)
            except Exception:  # one message may cost one request, never the gateway
                logger.exception("a message of %s could not be handled", incoming.sender.node_id)

    async def _beat(self) -> None:
        for sequence in itertools.count(1):
            self._channel.disconnected.clear()
            for ref in list(self._membership.workers):
                self.send(ref, Beat(sequence, 0))  # whose connection has ended is found out and removed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_INTERVAL_S - LEAST_BEAT_INTERVAL_S):
                    await self._channel.disconnected.wait()
            await asyncio.sleep(LEAST_BEAT_INTERVAL_S)

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            try:
                self._apply(self._membership.expire(now))
                for listener in self.listeners:
                    listener.tick(now)
            except Exception:  # the clock goes on for everybody else
                logger.exception("a periodic check failed")
            await asyncio.sleep(TICK_INTERVAL_S)

    # ---- messages -------------------------------------------------------------------------------------------------

    def _handle(self, sender: NodeRef, body: Message) -> None:
        match body:
            case Hello(info=info) if info.ref == sender:
                self._apply(self._membership.hello(info, time.monotonic()))
            case Goodbye():
                self._apply(self._membership.goodbye(sender))
            case _:
                self._apply(self._membership.heard(sender, body, time.monotonic()))
                if sender in self._membership.workers:
                    self._deliver(sender, body)

    def _deliver(self, sender: NodeRef, body: Message) -> None:
        match body:
            case LedgerReport(query_id=query_id) | Flushed(query_id=query_id):
                future = self._reports.get((sender, query_id))
                if future is not None and not future.done():
                    future.set_result(body)
            case _:
                for listener in self.listeners:
                    listener.handle(sender, body)

    def _apply(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(to=to, message=message):
                    self.send(to, message)
                case Joined(info=info) if info.ref in self._membership.workers:  # its Welcome may have failed
                    logger.info("%s joined (%s)", info.ref.node_id, "+".join(info.roles))
                    for listener in self.listeners:
                        listener.worker_joined(info)
                case Left(info=info, reason=reason):
                    logger.info("%s left: %s", info.ref.node_id, reason)
                    self._channel.forget(info.ref)
                    for listener in self.listeners:
                        listener.worker_left(info)
                case Rejected(ref=ref, reason=reason):
                    logger.warning("%s was refused: %s", ref.node_id, reason)
                    self._channel.forget(ref)
