"""Upload: a multipart form on its way to the disk, a piece at a time; it is never whole in memory."""

import asyncio
import errno
import re
from typing import BinaryIO

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from ...core.errors import RequestError
from ..generation import Unavailable
from .database import Database, Tables
from .file_table import new_file_id
from .objects import MAX_EXPIRY_S, MIN_EXPIRY_S, FileObject, Purpose

MAX_FILE_BYTES = 200 * 1000**2
MAX_FILENAME = 255  # characters that are kept of it
STALL_S = 60.0  # for the next piece to arrive
UPLOAD_TIMEOUT_S = 1800.0
_NUMBER = re.compile(r"[0-9]{1,9}")
_PIECE_BYTES = 256 * 1024
_MAX_FIELD_BYTES = 1024
_MAX_FIELDS = 16
_FORM_ERRORS = (ValueError, AssertionError, HttpProcessingError)  # what aiohttp raises for one that is cut or no form
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Upload:
    """One POST /v1/files. `receive` once; the form's fields may come in any order."""

    def __init__(self, database: Database, owner: str, now: float):
        self._database = database
        self._owner = owner
        self._now = now
        self._id = new_file_id()
        self._filename: str | None = None
        self._fields: dict[str, str] = {}

    async def receive(self, request: web.Request) -> FileObject:
        """Raises RequestError (400, 408, 413) for what is wrong with the form, Unavailable when the disk is full."""
        if not request.content_type.startswith("multipart/"):
            raise RequestError("send the file as multipart/form-data, with the fields purpose and file", "file")
        if (request.content_length or 0) > MAX_FILE_BYTES + _MAX_FIELDS * _MAX_FIELD_BYTES:
            raise _too_large()
        await self._database.call(self._require_room)
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                await self._read_form(await request.multipart())
            return await self._settle()
        except TimeoutError:
            raise RequestError("the file did not arrive in time; send it again", "file", status=408) from None
        except _FORM_ERRORS as error:
            raise RequestError(f"the form cannot be read: {str(error)[:200]}") from None
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise Unavailable("the disk of this server is full; delete files, or ask who runs it") from error
            raise
        finally:
            self._database.call_soon(lambda tables: tables.files.drop_draft(self._id))

    def _require_room(self, tables: Tables) -> None:
        tables.drop_expired(self._now)
        tables.files.require_room(self._owner)

    async def _read_form(self, form: MultipartReader) -> None:
        for _ in range(_MAX_FIELDS):
            async with asyncio.timeout(STALL_S):
                part = await form.next()
            if part is None:
                return
            if not isinstance(part, BodyPartReader):
                raise RequestError("a form within the form; send plain fields")
            if part.name == "file":
                await self._read_file(part)
            elif part.name is not None:
                async with asyncio.timeout(STALL_S):
                    self._fields[part.name] = await _read_field(part)
        raise RequestError(f"the form has more than {_MAX_FIELDS} fields")

    async def _read_file(self, part: BodyPartReader) -> None:
        if self._filename is not None:
            raise RequestError("the form has two files; send one at a time", "file")
        self._filename = (part.filename or "file")[:MAX_FILENAME]
        draft = await self._database.call(lambda tables: tables.files.new_draft(self._id))
        try:
            await self._copy(part, draft)
        finally:
            await asyncio.to_thread(draft.close)

    async def _copy(self, part: BodyPartReader, draft: BinaryIO) -> None:
        num_bytes = 0
        while True:
            async with asyncio.timeout(STALL_S):
                piece = await part.read_chunk(_PIECE_BYTES)
            if not piece:
                return
            num_bytes += len(piece)
            if num_bytes > MAX_FILE_BYTES:
                raise _too_large()
            await asyncio.to_thread(draft.write, piece)

    async def _settle(self) -> FileObject:
        if self._filename is None:
            raise RequestError("file is missing", "file")
        purpose = self._fields.pop("purpose", None)
        if purpose != Purpose.BATCH:
            raise RequestError("purpose must be batch; other files have no use here", "purpose")
        expires_at = self._expires_at()
        if self._fields:
            name = next(iter(self._fields))[:80]
            raise RequestError(f"{name}: not supported; leave it out", name, "unsupported_parameter")
        draft = FileObject(self._id, 0, int(self._now), self._filename, Purpose.BATCH, expires_at=expires_at)
        return await self._database.call(lambda tables: tables.keep(self._owner, draft))

    def _expires_at(self) -> int | None:
        """As the two fields of `expires_after` say."""
        anchor, text = (self._fields.pop(f"expires_after[{name}]", None) for name in ("anchor", "seconds"))
        if anchor is None and text is None:
            return None
        if anchor != "created_at":
            raise RequestError("expires_after[anchor] must be created_at", "expires_after")
        seconds = int(text) if text is not None and _NUMBER.fullmatch(text) else 0
        if not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
            raise RequestError(
                f"expires_after[seconds] must be a whole number from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}", "expires_after"
            )
        return int(self._now) + seconds


async def _read_field(part: BodyPartReader) -> str:
    value = await part.read_chunk(_MAX_FIELD_BYTES)
    if not part.at_eof() and await part.read_chunk(1):
        raise RequestError(f"a field has more than {_MAX_FIELD_BYTES} bytes", (part.name or "")[:80])
    return value.decode(errors="replace")


def _too_large() -> RequestError:
    return RequestError(f"the file is too large: at most {MAX_FILE_BYTES:,} bytes", "file", "file_too_large", 413)
