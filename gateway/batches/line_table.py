"""LineTable: the lines of unfinished batches: where each stands in its input file, and what became of it.

A line's result is kept here until the batch ends, in the same transaction that counts it: a line is either pending or
has exactly one result, whenever the process is killed. Only the database's thread uses it.
"""

import sqlite3
from enum import IntEnum
from typing import NamedTuple


class LineState(IntEnum):
    PENDING = 0
    COMPLETED = 1  # its result goes into the output file
    FAILED = 2  # its result goes into the error file


class Line(NamedTuple):
    """`size` bytes from `start` on in the input file. `number` counts from 1."""

    number: int
    custom_id: str
    start: int
    size: int


class LineTable:
    """Lines are named by their batch and number."""

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection

    def add(self, batch_id: str, line: Line) -> bool:
        """False when the batch has a line with this custom id already."""
        cursor = self._connection.execute(
            "INSERT OR IGNORE INTO lines (batch_id, number, custom_id, start, size) VALUES (?, ?, ?, ?, ?)",
            (batch_id, *line),
        )
        return cursor.rowcount == 1

    def pending(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """The next ones with numbers above `after`."""
        rows = self._connection.execute(
            "SELECT number, custom_id, start, size FROM lines WHERE batch_id = ? AND state = ? AND number > ? "
            "ORDER BY number LIMIT ?",
            (batch_id, LineState.PENDING, after, limit),
        )
        return [Line(*row) for row in rows]

    def finish(self, batch_id: str, number: int, state: LineState, result: bytes) -> bool:
        """False when it has a result already, which stays."""
        cursor = self._connection.execute(
            "UPDATE lines SET state = ?, result = ? WHERE batch_id = ? AND number = ? AND state = ?",
            (state, result, batch_id, number, LineState.PENDING),
        )
        return cursor.rowcount == 1

    def results(self, batch_id: str, state: LineState, after: int, limit: int) -> list[tuple[int, bytes]]:
        """(number, result) of the next ones with numbers above `after`."""
        return self._connection.execute(
            "SELECT number, result FROM lines WHERE batch_id = ? AND state = ? AND number > ? ORDER BY number LIMIT ?",
            (batch_id, state, after, limit),
        ).fetchall()

    def clear(self, batch_id: str) -> None:
        self._connection.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
