"""A workload being offered to a server: sessions in an open or closed loop, one record per request that ended."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import aiohttp

from .arrivals import closed_loop, open_loop
from .client import BenchClient, Conversation
from .options import DEFAULT_CONCURRENCY, BenchConfig
from .progress import LoadProgress, LoadState
from .record import RequestRecord
from .workloads import Workload

_PROGRESS_INTERVAL_S = 0.5


class Load:
    """Offers `workload` once. `records` holds the requests that have ended, in the order in which they did."""

    def __init__(self, http: aiohttp.ClientSession, config: BenchConfig, model: str, workload: Workload) -> None:
        self.records: list[RequestRecord] = []
        self._endpoint = config.target.endpoint
        self._concurrency = config.concurrency or DEFAULT_CONCURRENCY
        self._model = model
        self._workload = workload
        self._client = BenchClient(http, config.base_url, self._endpoint, config.load.timeout)
        self._in_flight = 0

    async def offer(self, progress: LoadProgress | None, stop: asyncio.Event | None) -> float:
        """Sends everything and returns how many seconds that took; drops what is in flight once `stop` is set."""
        # The collector would walk all prompts again and again and stall the clock of every stream meanwhile.
        gc.collect()
        gc.freeze()
        self._client.start_clock()
        try:
            async with self._shown(progress):
                await _until_stopped(self._all_sessions(), stop)
            return self._client.now()
        finally:
            gc.unfreeze()

    async def _all_sessions(self) -> None:
        if self._workload.arrivals_s is None:
            await closed_loop(len(self._workload.sessions), self._concurrency, self._session)
        else:
            await open_loop(self._workload.arrivals_s, self._session)

    async def _session(self, index: int) -> None:
        arrivals = self._workload.arrivals_s
        scheduled = None if arrivals is None else arrivals[index]
        conversation = Conversation(self._endpoint, self._model)
        failure: str | None = None
        for number, turn in enumerate(self._workload.sessions[index].turns):
            record = RequestRecord(session=index, turn=number, send_s=self._client.now(), scheduled_s=scheduled)
            if failure is None:
                body = conversation.ask(turn.content, turn.num_output_tokens)
                conversation.hear(await self._send(body, turn.num_output_tokens, record))
                failure = record.error and "not sent, since an earlier turn of its session failed"
            else:
                record.error = failure
            self.records.append(record)
            scheduled = None  # a later turn is due whenever the one before has ended

    async def _send(self, body: bytes, num_asked: int, record: RequestRecord) -> str:
        self._in_flight += 1
        try:
            return await self._client.send(body, num_asked, record)
        finally:
            self._in_flight -= 1

    @contextlib.asynccontextmanager
    async def _shown(self, progress: LoadProgress | None) -> AsyncIterator[None]:
        if progress is None:
            yield
            return
        with progress:
            ticker = asyncio.create_task(self._show_repeatedly(progress))
            try:
                yield
            finally:
                ticker.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await ticker

    async def _show_repeatedly(self, progress: LoadProgress) -> None:
        while True:
            failed = sum(record.error is not None for record in self.records)
            progress.show(LoadState(len(self.records), failed, self._in_flight, self._workload.num_requests))
            await asyncio.sleep(_PROGRESS_INTERVAL_S)


async def _until_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event | None) -> None:
    """Awaits `work`, but cancels it once `stop` is set."""
    if stop is None:
        await work
        return
    running = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        running.cancel()  # no effect once it has ended
    await asyncio.wait({running})
    if not running.cancelled():
        running.result()
