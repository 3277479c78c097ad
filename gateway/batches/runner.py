"""BatchRunner: sees every unfinished batch through to its end, beside live traffic.

Each batch has a task that goes through the table of `life.py`. What it has reached is in the database before the next
step begins, so that a gateway that starts again takes each batch up where the last one left it:

    validating    the lines entered so far are dropped, and it is read again from its first line
    in_progress   lines with a result are left alone, all others run
    finalizing, cancelling    the files are written anew; they appear in the same transaction that ends the batch

Nothing is aborted half way by a stop: lines without a result are pending again.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ...core.errors import RequestError
from ..generation import Unavailable
from .database import Database, Tables
from .finishing import Finisher
from .life import end_of, is_over, moved
from .line_answer import LineAnswerer, new_request_id
from .line_table import Line, LineState
from .objects import Batch, LineErrors, Status
from .results import LineResult, answered, refused
from .validation import Validator, read_body

MAX_IN_FLIGHT = 64  # lines of all batches; batches take turns
MAX_FAILURES = 6  # of workers, at one line
_FETCHED_LINES = 64
_LONGEST_RETRY_S = 60.0
_TROUBLE_PAUSE_S = 10.0  # before a batch is taken up again that met a bug, or a full disk
_UNAVAILABLE = (429, 503)

logger = logging.getLogger(__name__)


class BatchRunner:
    """`run` until cancelled. `now`: Unix seconds. `count_line` is told how each line ended: completed or failed."""

    def __init__(
        self,
        database: Database,
        answerer: LineAnswerer,
        longest_line: int,
        check_model: Callable[[str | None], None],
        now: Callable[[], float] = time.time,
        count_line: Callable[[str], None] = lambda outcome: None,
    ):
        self._database = database
        self._answerer = answerer
        self._longest_line = longest_line
        self._check_model = check_model
        self._now = now
        self._count_line = count_line
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._batches: dict[str, asyncio.Task[None]] = {}  # unfinished batch |-> who sees it through
        self._works: dict[str, asyncio.Task[None]] = {}  # of those, what can be cut short
        self._interrupted: set[str] = set()
        self._is_stopped = False

    async def resume(self) -> None:
        """Takes up what an earlier gateway left. Raises ConfigurationError when its folder cannot be used."""
        if not self._database.exists:
            return
        for owner, batch in await self._database.call(lambda tables: tables.batches.unfinished()):
            logger.info("batch %s goes on: %s", batch.id, batch.status)
            self.start(owner, batch.id)

    def start(self, owner: str, batch_id: str) -> None:
        """A batch that is in the database; nothing happens when it is seen to already."""
        if self._is_stopped or batch_id in self._batches:
            return
        task = asyncio.create_task(self._see_through(owner, batch_id))
        self._batches[batch_id] = task
        task.add_done_callback(lambda _: self._forget(batch_id))

    def interrupt(self, batch_id: str) -> None:
        """The batch is to be cancelled, as the database says already: lines in flight end."""
        if batch_id in self._batches:
            self._interrupted.add(batch_id)
        if batch_id in self._works:
            self._works[batch_id].cancel()

    async def stop(self) -> None:
        """Lines in flight end and are pending again; no batch goes on."""
        self._is_stopped = True
        tasks = list(self._batches.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _forget(self, batch_id: str) -> None:
        del self._batches[batch_id]
        self._interrupted.discard(batch_id)

    async def _see_through(self, owner: str, batch_id: str) -> None:
        while True:
            try:
                batch = await self._database.call(lambda tables: tables.batches.known(batch_id))
                if is_over(batch.status):
                    return
                if batch_id not in self._interrupted:
                    await self._work_in_time(owner, batch)
                await self._finish(owner, batch_id)
            except Exception:
                logger.exception("batch %s met with an error; it goes on in %g s", batch_id, _TROUBLE_PAUSE_S)
                await asyncio.sleep(_TROUBLE_PAUSE_S)

    async def _work_in_time(self, owner: str, batch: Batch) -> None:
        """Until its lines are done, it expires, or it is interrupted."""
        work = asyncio.create_task(self._work(owner, batch))
        self._works[batch.id] = work
        try:
            await asyncio.wait([work], timeout=max(batch.expires_at - self._now(), 0.0))
        finally:
            del self._works[batch.id]
            work.cancel()
            await asyncio.wait([work])
        if not work.cancelled():
            work.result()

    async def _work(self, owner: str, batch: Batch) -> None:
        if batch.status is Status.VALIDATING:
            batch = await self._validate(batch)
        if batch.status is Status.IN_PROGRESS:
            await self._run_lines(owner, batch)
            await self._database.call(lambda tables: self._move(tables, batch.id, Status.FINALIZING))

    def _move(self, tables: Tables, batch_id: str, status: Status, **changes: Any) -> Batch:
        """The batch in that status, with `changes`, unless its client has cancelled it meanwhile."""
        with tables.transaction():
            batch = tables.batches.known(batch_id)
            if batch.status is Status.CANCELLING:
                return batch
            changed = msgspec.structs.replace(moved(batch, status, self._now()), **changes)
            return tables.batches.save(changed)

    # ---- validating --------------------------------------------------------------------------------------------------

    async def _validate(self, batch: Batch) -> Batch:
        """The batch in progress, or failed with what is wrong with its file."""

        def begin(tables: Tables) -> Validator:
            tables.lines.clear(batch.id)
            return Validator(
                tables.files.path(batch.input_file_id),
                batch.endpoint,
                self._longest_line,
                lambda line: tables.lines.add(batch.id, line),
                self._check_model,
            )

        def step(tables: Tables) -> bool:
            with tables.transaction():
                validator.step()
            return not validator.is_done

        validator = await self._database.call(begin)
        while await self._database.call(step):
            pass
        return await self._database.call(lambda tables: self._validated(tables, batch.id, validator))

    def _validated(self, tables: Tables, batch_id: str, validator: Validator) -> Batch:
        if not validator.errors:
            tables.batches.set_num_lines(batch_id, validator.num_lines)
            return self._move(tables, batch_id, Status.IN_PROGRESS)
        batch = self._move(tables, batch_id, Status.FAILED, errors=LineErrors(validator.errors))
        if batch.status is Status.FAILED:
            tables.lines.clear(batch_id)
            tables.files.release()
        return batch

    # ---- in progress -------------------------------------------------------------------------------------------------

    async def _run_lines(self, owner: str, batch: Batch) -> None:
        """All that are pending; returns when each has a result."""
        after = 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                last = after
                lines = await self._database.call(
                    lambda tables: tables.lines.pending(batch.id, last, _FETCHED_LINES)  # noqa: B023 - awaited at once
                )
                if not lines:
                    return
                for line in lines:
                    await self._slots.acquire()
                    task = tasks.create_task(self._run_line(owner, batch, line))
                    task.add_done_callback(lambda _: self._slots.release())
                after = lines[-1].number

    async def _run_line(self, owner: str, batch: Batch, line: Line) -> None:
        request_id = new_request_id()
        body = await self._database.call(lambda tables: read_body(tables.files.path(batch.input_file_id), line))
        try:
            result = answered(line, request_id, await self._answer(owner, batch, request_id, body))
        except RequestError as error:
            result = refused(line, request_id, error)
        except Exception:
            logger.exception("line %d of batch %s failed", line.number, batch.id)
            failed = RequestError("the server failed here; its log says why", status=500)
            result = refused(line, request_id, failed)
        if await self._database.call(lambda tables: record(tables, batch.id, line.number, result)):
            self._count_line(result.state.name.lower())

    async def _answer(self, owner: str, batch: Batch, request_id: str, body: bytes) -> bytes:
        """Overload and missing workers are waited for as long as HTTP clients are asked to. A line that workers take
        and fail again and again may be what they fail at: that has an end.
        """
        num_failures = 0
        while True:
            try:
                return await self._answerer.answer(batch.endpoint, owner, request_id, body)
            except Unavailable as error:
                num_failures += error.retry_after is None
                if error.status not in _UNAVAILABLE or num_failures > MAX_FAILURES:
                    raise
                pause_s = 2.0**num_failures if error.retry_after is None else error.retry_after
            await asyncio.sleep(min(pause_s, _LONGEST_RETRY_S))

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def _finish(self, owner: str, batch_id: str) -> None:
        """Writes its files and gives it its last status; nothing happens when it has that already."""
        batch = await self._database.call(lambda tables: tables.batches.known(batch_id))
        if is_over(batch.status):
            return
        finisher = Finisher(owner, batch_id, end_of(batch.status), self._now)
        while await self._database.call(finisher.step):
            pass


def record(tables: Tables, batch_id: str, number: int, result: LineResult) -> bool:
    """The result of a line, which is counted in the same transaction. False: it is a second one, and dropped."""
    with tables.transaction():
        is_first = tables.lines.finish(batch_id, number, result.state, result.text)
        if is_first:
            tables.batches.count_line(batch_id, is_error=result.state is LineState.FAILED)
    return is_first
