"""FileTable: the files of all owners. Only the database's thread uses it."""

import os
import secrets
import sqlite3
from pathlib import Path
from typing import BinaryIO

import msgspec

from ...core.errors import RequestError
from ..paging import Page, page_of
from .objects import FileObject

MAX_FILES = 10_000  # of one owner
MAX_OWNER_BYTES = 20 * 1024**3
_NEW_PREFIX = ".new-"

_decode = msgspec.json.Decoder(FileObject).decode


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


class FileTable:
    """`owner`: the digest of an API key, "" where none is asked for. Nobody sees another owner's files."""

    def __init__(self, connection: sqlite3.Connection, folder: Path):
        self._connection = connection
        self._folder = folder

    def new_draft(self, file_id: str) -> BinaryIO:
        """An empty file to write, 0600; `settle` or a drop comes next."""
        return open(self.draft_path(file_id), "xb", opener=_private)

    def draft_path(self, file_id: str) -> Path:
        """Where a file is written until it is whole."""
        return self._folder / f"{_NEW_PREFIX}{file_id}"

    def path(self, file_id: str) -> Path:
        """Of a file the table knows."""
        return self._folder / file_id

    def settle(self, file_id: str) -> int:
        """Put a written draft in its place, for good; its size. It still has to be added."""
        draft = self.draft_path(file_id)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        num_bytes = draft.stat().st_size
        draft.rename(self.path(file_id))
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return num_bytes

    def drop_draft(self, file_id: str) -> None:
        """Nothing happens when there is none, or it has been settled."""
        self.draft_path(file_id).unlink(missing_ok=True)

    def drop(self, file_id: str) -> None:
        """What was written of a file that will not be added."""
        self.drop_draft(file_id)
        self.path(file_id).unlink(missing_ok=True)

    def add(self, owner: str, file: FileObject) -> None:
        self._connection.execute(
            "INSERT INTO files (id, owner, purpose, num_bytes, document) VALUES (?, ?, ?, ?, ?)",
            (file.id, owner, file.purpose, file.bytes, msgspec.json.encode(file)),
        )
        if file.expires_at is not None:
            self._connection.execute("INSERT INTO expiring_files VALUES (?, ?)", (file.id, file.expires_at))

    def expired(self, now: float) -> list[str]:
        """Ids of those whose time is over; each has to be dropped."""
        rows = self._connection.execute("SELECT file_id FROM expiring_files WHERE expires_at <= ?", (now,))
        return [file_id for (file_id,) in rows.fetchall()]

    def drop_expired(self, file_id: str, *, is_used: bool) -> None:
        """It may have been deleted before."""
        self._connection.execute("DELETE FROM expiring_files WHERE file_id = ?", (file_id,))
        self._forget(file_id, is_used=is_used)

    def require_room(self, owner: str) -> None:
        """Raises RequestError (400) when the owner has as many files, or as many bytes of them, as one may have."""
        count, num_bytes = self._connection.execute(
            "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM files WHERE owner = ?", (owner,)
        ).fetchone()
        if count >= MAX_FILES or num_bytes >= MAX_OWNER_BYTES:
            raise RequestError(
                f"{count:,} files with {num_bytes:,} bytes are kept for you; the most are {MAX_FILES:,} files and "
                f"{MAX_OWNER_BYTES:,} bytes. Delete some",
                "file",
                "too_many_files",
            )

    def get(self, owner: str, file_id: str, param: str | None = None) -> FileObject:
        """Raises RequestError (404), which names `param`."""
        row = self._connection.execute(
            "SELECT document FROM files WHERE id = ? AND owner = ? AND NOT is_deleted", (file_id, owner)
        ).fetchone()
        if row is None:
            raise RequestError("there is no such file; GET /v1/files lists yours", param, "file_not_found", 404)
        return _decode(row[0])

    def page(self, owner: str, page: Page, purpose: str | None) -> tuple[list[FileObject], bool]:
        """What is on it, and whether more comes after it."""
        conditions = ["owner = ?", "NOT is_deleted"]
        values = [owner]
        if purpose is not None:
            conditions.append("purpose = ?")
            values.append(purpose)
        rows, has_more = page_of(self._connection, "files", conditions, values, page)
        return [_decode(document) for (document,) in rows], has_more

    def delete(self, owner: str, file_id: str, *, is_used: bool) -> None:
        """Nobody finds it any more; its bytes stay as long as it `is_used`. Raises RequestError (404)."""
        self.get(owner, file_id)
        self._forget(file_id, is_used=is_used)

    def _forget(self, file_id: str, *, is_used: bool) -> None:
        if is_used:
            self._connection.execute("UPDATE files SET is_deleted = 1 WHERE id = ?", (file_id,))
        else:
            self._remove(file_id)

    def release(self) -> None:
        """A batch has ended: deleted files that no other reads lose their bytes too."""
        rows = self._connection.execute(
            "SELECT id FROM files WHERE is_deleted AND id NOT IN (SELECT input_file_id FROM batches WHERE NOT is_over)"
        ).fetchall()
        for (file_id,) in rows:
            self._remove(file_id)

    def _remove(self, file_id: str) -> None:
        """First from the table: bytes that nobody names are rubbish, the other way round they would be missed."""
        self._connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)

    def remove_rubbish(self) -> None:
        """What a gateway that was killed left half done."""
        self.release()
        known = {file_id for (file_id,) in self._connection.execute("SELECT id FROM files")}
        for path in self._folder.iterdir():
            if path.name not in known:
                path.unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
