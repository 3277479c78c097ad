"""BatchTable: the batches of all owners. Only the database's thread uses it."""

import secrets
import sqlite3
from typing import Any, NamedTuple

import msgspec

from ...core.errors import RequestError
from ..paging import Page, page_of
from .life import is_over
from .objects import Batch, RequestCounts

MAX_UNFINISHED = 100  # batches of one owner

_COLUMNS = "num_lines, num_completed, num_failed, document"
_decode = msgspec.json.Decoder(Batch).decode


class OwnedBatch(NamedTuple):
    owner: str
    batch: Batch


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


class BatchTable:
    """`owner` as in FileTable. The counts of a batch have columns of their own: they change with every line."""

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection

    def add(self, owner: str, batch: Batch) -> None:
        """Raises RequestError (429) when the owner has as many unfinished ones as one may have."""
        (count,) = self._connection.execute(
            "SELECT COUNT(*) FROM batches WHERE owner = ? AND NOT is_over", (owner,)
        ).fetchone()
        if count >= MAX_UNFINISHED:
            raise RequestError(
                f"{count} of your batches are unfinished, which is the most; wait for one, or cancel one",
                None,
                "too_many_batches",
                429,
            )
        self._connection.execute(
            "INSERT INTO batches (id, owner, input_file_id, document) VALUES (?, ?, ?, ?)",
            (batch.id, owner, batch.input_file_id, msgspec.json.encode(batch)),
        )

    def get(self, owner: str, batch_id: str) -> Batch:
        """Raises RequestError (404)."""
        row = self._connection.execute(
            f"SELECT {_COLUMNS} FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
        ).fetchone()
        if row is None:
            raise RequestError("there is no such batch; GET /v1/batches lists yours", None, "batch_not_found", 404)
        return _batch(row)

    def page(self, owner: str, page: Page) -> tuple[list[Batch], bool]:
        """What is on it, and whether more comes after it."""
        rows, has_more = page_of(self._connection, "batches", ["owner = ?"], [owner], page, _COLUMNS)
        return [_batch(row) for row in rows], has_more

    def known(self, batch_id: str) -> Batch:
        """One that is there, whoever owns it."""
        return _batch(self._connection.execute(f"SELECT {_COLUMNS} FROM batches WHERE id = ?", (batch_id,)).fetchone())

    def unfinished(self) -> list[OwnedBatch]:
        """Of all owners, the oldest first."""
        rows = self._connection.execute(f"SELECT owner, {_COLUMNS} FROM batches WHERE NOT is_over ORDER BY seq")
        return [OwnedBatch(owner, _batch(row)) for owner, *row in rows]

    def is_used(self, file_id: str) -> bool:
        """An unfinished batch still reads it."""
        row = self._connection.execute(
            "SELECT 1 FROM batches WHERE input_file_id = ? AND NOT is_over LIMIT 1", (file_id,)
        ).fetchone()
        return row is not None

    def save(self, batch: Batch) -> Batch:
        """All of it but the counts."""
        self._connection.execute(
            "UPDATE batches SET document = ?, is_over = ? WHERE id = ?",
            (msgspec.json.encode(batch), is_over(batch.status), batch.id),
        )
        return batch

    def set_num_lines(self, batch_id: str, num_lines: int) -> None:
        self._connection.execute("UPDATE batches SET num_lines = ? WHERE id = ?", (num_lines, batch_id))

    def count_line(self, batch_id: str, *, is_error: bool) -> None:
        column = "num_failed" if is_error else "num_completed"
        self._connection.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (batch_id,))


def _batch(row: Any) -> Batch:
    num_lines, num_completed, num_failed, document = row
    counts = RequestCounts(num_lines, num_completed, num_failed)
    return msgspec.structs.replace(_decode(document), request_counts=counts)
