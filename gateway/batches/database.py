"""Database: the SQLite file and the folder in which files and batches are kept, and the one thread that uses them.

    FOLDER/             0700
        lock            held while a gateway uses the folder; the kernel drops it with its owner
        batches.sqlite  write-ahead log: what was committed survives a kill at any moment
        files/ID        one for each file; the id is minted here
        files/.new-ID   a file that is not whole yet; left ones go at the next start

Nothing is made before somebody uses it. A file is written beside its place, synced, renamed and only then entered in
the database, so what the database names is whole, and what it does not name is rubbish.
"""

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from ...core.errors import ConfigurationError
from .batch_table import BatchTable
from .file_table import FileTable
from .line_table import LineTable
from .objects import FileObject

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, is_deleted INTEGER NOT NULL DEFAULT 0, document BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS expiring_files (file_id TEXT PRIMARY KEY, expires_at INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS files_by_expiry ON expiring_files (expires_at);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, seq);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, input_file_id TEXT NOT NULL,
    is_over INTEGER NOT NULL DEFAULT 0, num_lines INTEGER NOT NULL DEFAULT 0, num_completed INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0, document BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, seq);
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, start INTEGER NOT NULL,
    size INTEGER NOT NULL, state INTEGER NOT NULL DEFAULT 0, result BLOB,
    PRIMARY KEY (batch_id, number), UNIQUE (batch_id, custom_id));
CREATE INDEX IF NOT EXISTS lines_by_state ON lines (batch_id, state, number);
"""
_LOCK, _DATABASE, _FILES = "lock", "batches.sqlite", "files"
_BUSY_TIMEOUT_S = 5.0

_T = TypeVar("_T")


class Tables:
    """The open database; only its thread may use it. `transaction` makes several changes one."""

    def __init__(self, folder: Path):
        """Raises ConfigurationError when the folder cannot be used, or another gateway uses it."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(folder)
            files = folder / _FILES
            files.mkdir(mode=0o700, exist_ok=True)
            self._connection = _connect(folder / _DATABASE)
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"cannot keep batches in {folder}: {error}. Name a folder on a local disk with --batch-dir"
            ) from error
        self.files = FileTable(self._connection, files)
        self.batches = BatchTable(self._connection)
        self.lines = LineTable(self._connection)
        self.files.remove_rubbish()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def keep(self, owner: str, draft: FileObject) -> FileObject:
        """A written draft becomes a file of `owner`; the file, with its size."""
        file = msgspec.structs.replace(draft, bytes=self.files.settle(draft.id))
        with self.transaction():
            self.files.add(owner, file)
        return file

    def drop_expired(self, now: float) -> None:
        """Files whose time is over go as if they were deleted."""
        for file_id in self.files.expired(now):
            with self.transaction():
                self.files.drop_expired(file_id, is_used=self.batches.is_used(file_id))

    def close(self) -> None:
        self._connection.close()
        os.close(self._lock)


class Database:
    """Calls functions with the open Tables, one after the other, on a thread of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._tables: Tables | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")

    @property
    def exists(self) -> bool:
        """Somebody has used it, now or before."""
        return self._tables is not None or (self.folder / _DATABASE).exists()

    async def call(self, function: Callable[[Tables], _T]) -> _T:
        """`function`'s answer. It goes on when the caller is cancelled. Raises ConfigurationError as Tables."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(self._open()))

    def call_soon(self, function: Callable[[Tables], None]) -> None:
        """After what has been called before; nobody waits for it."""
        self._thread.submit(lambda: function(self._open()))

    def close(self) -> None:
        """Waits for what has been called."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=True)

    def _open(self) -> Tables:
        if self._tables is None:
            self._tables = Tables(self.folder)
        return self._tables

    def _close(self) -> None:
        if self._tables is not None:
            self._tables.close()


def _locked(folder: Path) -> int:
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigurationError(
            f"another server keeps its batches in {folder}. Give each server a folder of its own with --batch-dir"
        ) from None
    return lock


def _connect(path: Path) -> sqlite3.Connection:
    """Commits survive the death of the process; that of the machine may take the last ones, whose lines run again."""
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.executescript(_SCHEMA)
    return connection
