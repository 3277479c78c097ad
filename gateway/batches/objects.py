"""The JSON objects of /v1/files and /v1/batches. /openapi.json is made of the same structs; so is what is stored."""

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..openai.fields import Refused
from ..responses.answers import ResponseUsage

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
WINDOWS = {"24h": 24 * 3600}  # completion windows |-> seconds
MAX_METADATA = 16
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600  # of files that are not to be kept until they are deleted
# What the documents say; what is refused is told in words by the service.
_Endpoint = Annotated[str, Meta(extra_json_schema={"enum": list(ENDPOINTS)})]
_Window = Annotated[str, Meta(extra_json_schema={"enum": list(WINDOWS)})]
_MetadataKey = Annotated[str, Meta(max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]


class Purpose(StrEnum):
    """What a file is for: clients send the first, this server writes the second."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class Status(StrEnum):
    """Of a batch; `life.py` says what may follow what."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class FileObject(msgspec.Struct):
    """`filename` is what the client called it: a label, and never a path here. `expires_at`: None: it is kept until it
    is deleted.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(msgspec.Struct):
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class FileDeleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class LineError(msgspec.Struct):
    """What is wrong with an input file. `line` counts from 1; None: with the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(msgspec.Struct):
    data: list[LineError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """`total`: lines of the input; the other two: those of them that were answered, and those that got an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """Times are whole Unix seconds; each `..._at` is when the batch came into that status. `usage`: of all its answers,
    told when it is over; reasoning tokens are those of /v1/responses.
    """

    id: str
    endpoint: str
    model: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = Status.VALIDATING
    object: Literal["batch"] = "batch"
    errors: LineErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    usage: ResponseUsage | None = None


class BatchList(msgspec.Struct):
    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class BatchRequest(msgspec.Struct):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: _Endpoint
    completion_window: _Window
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=MAX_METADATA)] | None = None
    output_expires_after: Refused = None


class OutputError(msgspec.Struct):
    """Why a line was never run."""

    code: str
    message: str


class OutputResponse(msgspec.Struct):
    """`body`: the answer, or the error object, as an HTTP client would have got it with this status."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class OutputLine(msgspec.Struct):
    """One line of an output or error file; exactly one of `response` and `error` is null."""

    id: str
    custom_id: str
    response: OutputResponse | None
    error: OutputError | None
