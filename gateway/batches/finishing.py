"""Finisher: writes the output and the error file of a batch, and ends it."""

from collections.abc import Callable, Generator, Iterator

import msgspec

from ..responses.answers import InputTokensDetails, OutputTokensDetails, ResponseUsage
from .database import Tables
from .file_table import new_file_id
from .life import moved
from .objects import FileObject, Purpose, Status
from .results import counted, error_lines, output_lines

_STEP_LINES = 64  # written at a time: other callers of the database wait that long


class Finisher:
    """`step` until it is False. Before, nothing of it is seen: files and status come in one transaction."""

    def __init__(self, owner: str, batch_id: str, end: Status, now: Callable[[], float]):
        self._owner = owner
        self._batch_id = batch_id
        self._end = end
        self._now = now
        self._output_id, self._error_id = new_file_id(), new_file_id()
        self._usage = ResponseUsage(0, InputTokensDetails(0), 0, OutputTokensDetails(0), 0)
        self._steps: Iterator[None] | None = None

    def step(self, tables: Tables) -> bool:
        if self._steps is None:
            self._steps = self._all_steps(tables)
        return next(self._steps, self) is not self

    def _all_steps(self, tables: Tables) -> Iterator[None]:
        try:
            outputs = counted(output_lines(tables.lines, self._batch_id), self._usage)
            num_outputs = yield from _written(tables, self._output_id, outputs)
            errors = error_lines(tables.lines, self._batch_id, self._end)
            num_errors = yield from _written(tables, self._error_id, errors)
            with tables.transaction():
                self._end_batch(tables, num_outputs > 0, num_errors > 0)
        except BaseException:  # a full disk, or nobody goes on with it: another Finisher will write files of its own
            tables.files.drop(self._output_id)
            tables.files.drop(self._error_id)
            raise
        tables.files.release()

    def _end_batch(self, tables: Tables, has_outputs: bool, has_errors: bool) -> None:
        batch = tables.batches.known(self._batch_id)
        if has_outputs:
            self._add_file(tables, self._output_id, f"{batch.id}_output.jsonl")
        if has_errors:
            self._add_file(tables, self._error_id, f"{batch.id}_error.jsonl")
        ended = msgspec.structs.replace(
            moved(batch, self._end, self._now()),
            output_file_id=self._output_id if has_outputs else None,
            error_file_id=self._error_id if has_errors else None,
            usage=self._usage,
        )
        tables.batches.save(ended)
        tables.lines.clear(batch.id)

    def _add_file(self, tables: Tables, file_id: str, filename: str) -> None:
        num_bytes = tables.files.path(file_id).stat().st_size
        file = FileObject(file_id, num_bytes, int(self._now()), filename, Purpose.BATCH_OUTPUT)
        tables.files.add(self._owner, file)


def _written(tables: Tables, file_id: str, texts: Iterator[bytes]) -> Generator[None, None, int]:
    """Writes a file, a line for each text; their number. No texts, no file."""
    count = 0
    with tables.files.new_draft(file_id) as draft:
        for text in texts:
            draft.write(text + b"\n")
            count += 1
            if count % _STEP_LINES == 0:
                yield
    if count:
        tables.files.settle(file_id)
    else:
        tables.files.drop(file_id)
    return count
