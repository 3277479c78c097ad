"""What a batch's lines become: result lines, and in the end the output file and the error file."""

import secrets
from collections.abc import Iterator

import msgspec

from ...core.errors import RequestError
from ..openai.answers import answer_of
from .line_table import Line, LineState, LineTable
from .objects import OutputError, OutputLine, OutputResponse, Status

_FETCHED_LINES = 64
_NEVER_RUN = {
    Status.EXPIRED: OutputError(
        "batch_expired", "This request could not be executed before the completion window expired."
    ),
    Status.CANCELLED: OutputError("batch_cancelled", "This request was not executed before the batch was cancelled."),
}


class LineResult(msgspec.Struct, frozen=True):
    """`text`: one line of the output or error file, without its line break."""

    state: LineState
    text: bytes


def answered(line: Line, request_id: str, body: bytes) -> LineResult:
    """`body`: the answer as JSON."""
    return LineResult(LineState.COMPLETED, _spell(line.custom_id, OutputResponse(200, request_id, msgspec.Raw(body))))


def refused(line: Line, request_id: str, error: RequestError) -> LineResult:
    """The line is answered as an HTTP request with the same body would be."""
    body = msgspec.json.encode(answer_of(error))
    response = OutputResponse(error.status, request_id, msgspec.Raw(body))
    return LineResult(LineState.FAILED, _spell(line.custom_id, response))


def _spell(custom_id: str, response: OutputResponse | None, error: OutputError | None = None) -> bytes:
    return msgspec.json.encode(OutputLine(f"batch_req_{secrets.token_hex(12)}", custom_id, response, error))


def output_lines(lines: LineTable, batch_id: str) -> Iterator[bytes]:
    """Of the output file, in the order of the input."""
    after = 0
    while rows := lines.results(batch_id, LineState.COMPLETED, after, _FETCHED_LINES):
        yield from (text for _, text in rows)
        after = rows[-1][0]


def error_lines(lines: LineTable, batch_id: str, end: Status) -> Iterator[bytes]:
    """Of the error file: lines that got an error, then those that never ran because the batch came to its `end`."""
    after = 0
    while rows := lines.results(batch_id, LineState.FAILED, after, _FETCHED_LINES):
        yield from (text for _, text in rows)
        after = rows[-1][0]
    after = 0
    while end in _NEVER_RUN and (pending := lines.pending(batch_id, after, _FETCHED_LINES)):
        yield from (_spell(line.custom_id, None, _NEVER_RUN[end]) for line in pending)
        after = pending[-1].number
