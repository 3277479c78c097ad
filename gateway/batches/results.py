"""What a batch's lines become: result lines, and in the end the output file and the error file."""

import secrets
from collections.abc import Iterator

import msgspec

from ...core.errors import RequestError
from ..openai.answers import answer_of
from ..responses.answers import InputTokensDetails, OutputTokensDetails, ResponseUsage
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


class _CountedTokens(msgspec.Struct):
    """The counts of an answer, as chat and completions have them, or as the Responses API does."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: InputTokensDetails | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: InputTokensDetails | None = None
    output_tokens_details: OutputTokensDetails | None = None


class _CountedBody(msgspec.Struct):
    usage: _CountedTokens = msgspec.field(default_factory=_CountedTokens)


class _CountedResponse(msgspec.Struct):
    body: _CountedBody


class _CountedLine(msgspec.Struct):
    response: _CountedResponse


_decode_counts = msgspec.json.Decoder(_CountedLine).decode


def counted(texts: Iterator[bytes], usage: ResponseUsage) -> Iterator[bytes]:
    """Lines of an output file as they are; what each has used is added to `usage`."""
    for text in texts:
        told = _decode_counts(text).response.body.usage
        cached = told.prompt_tokens_details or told.input_tokens_details
        usage.input_tokens += told.prompt_tokens + told.input_tokens
        usage.output_tokens += told.completion_tokens + told.output_tokens
        usage.total_tokens = usage.input_tokens + usage.output_tokens
        usage.input_tokens_details.cached_tokens += 0 if cached is None else cached.cached_tokens
        if told.output_tokens_details is not None:
            usage.output_tokens_details.reasoning_tokens += told.output_tokens_details.reasoning_tokens
        yield text


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
