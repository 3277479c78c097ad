"""Batches: files and batches of one gateway, put together; what the HTTP handlers work with."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...core.errors import ConfigurationError, RequestError
from ..generation import Unavailable
from ..openai.refused import refuse_unsupported
from .batch_table import new_batch_id
from .database import Database, Tables
from .life import cancelled
from .line_answer import LineAnswerer
from .objects import ENDPOINTS, WINDOWS, Batch, BatchRequest, Purpose
from .runner import BatchRunner

if TYPE_CHECKING:  # the gateway has this as one of its parts
    from ..gateway import Gateway

logger = logging.getLogger(__name__)


_T = TypeVar("_T")


class Batches:
    """`folder`: where it all is kept; None: this gateway keeps none."""

    def __init__(self, gateway: "Gateway", folder: Path | None, now: Callable[[], float] = time.time):
        config = gateway.config
        self._model = config.served_model
        self.now = now
        self._database = None if folder is None else Database(folder)
        self._runner = None
        if self._database is not None:
            check_model = gateway.parser.check_model
            answerer = LineAnswerer(gateway)
            count_line = gateway.metrics.batch_line_ended
            self._runner = BatchRunner(self._database, answerer, config.max_body_bytes, check_model, now, count_line)

    async def resume(self) -> None:
        """Goes on with what an earlier gateway left. Raises ConfigurationError when the folder cannot be used."""
        if self._runner is not None:
            await self._runner.resume()

    async def stop(self) -> None:
        """Lines that run are cut short, and run again after the next start."""
        if self._runner is not None:
            await self._runner.stop()

    def close(self) -> None:
        """After `stop`; waits for the disk."""
        if self._database is not None:
            self._database.close()

    @property
    def database(self) -> Database:
        """Raises RequestError (404) when this gateway keeps none."""
        if self._database is None:
            raise RequestError("this server keeps no files and batches; start it with --batch-dir", status=404)
        return self._database

    async def create(self, owner: str, request: BatchRequest) -> Batch:
        """A batch that is being validated. Raises RequestError for what is wrong with the request."""
        refuse_unsupported(request)
        if request.endpoint not in ENDPOINTS:
            raise RequestError(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
        if request.completion_window not in WINDOWS:
            raise RequestError(f"completion_window must be {', '.join(WINDOWS)}", "completion_window")
        created_at = int(self.now())
        batch = Batch(
            id=new_batch_id(),
            endpoint=request.endpoint,
            model=self._model,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            created_at=created_at,
            expires_at=created_at + WINDOWS[request.completion_window],
            metadata=request.metadata,
        )

        def add(tables: Tables) -> None:
            with tables.transaction():
                file = tables.files.get(owner, batch.input_file_id, "input_file_id")
                if file.purpose is not Purpose.BATCH:
                    raise RequestError("input_file_id: this file was not uploaded for a batch", "input_file_id")
                tables.batches.add(owner, batch)

        await self.call(add)
        assert self._runner is not None
        self._runner.start(owner, batch.id)
        return batch

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """The batch as it is then. Raises RequestError: 404, or 409 when it is too late."""

        def mark(tables: Tables) -> Batch:
            with tables.transaction():
                batch = cancelled(tables.batches.get(owner, batch_id), self.now())
                return tables.batches.save(batch)

        batch = await self.call(mark)
        assert self._runner is not None
        self._runner.interrupt(batch_id)
        return batch

    async def call(self, function: Callable[[Tables], _T]) -> _T:
        """`function`'s answer, without what has expired. Raises RequestError (404, 503) when there is no folder, or it
        cannot be used.
        """

        def called(tables: Tables) -> _T:
            tables.drop_expired(self.now())
            return function(tables)

        try:
            return await self.database.call(called)
        except ConfigurationError as error:
            logger.error("%s", error)
            raise Unavailable("files and batches cannot be kept now; the log of the server says why") from None
