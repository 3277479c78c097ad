"""The answer to one streamed request, chunk by chunk: what it says and whether it is complete. No sockets."""

from typing import Any

import msgspec

from ..core.errors import BatonError
from .record import RequestRecord

MAX_ERROR_CHARS = 500


class RequestFailed(BatonError):
    """One request did not bring a complete answer; the text says why."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    role: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None  # completions
    delta: _Delta | None = None  # chat
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    def may_hold_tokens(self) -> bool:
        """False for a chat chunk that only announces the role or the end; an empty text can be a special token."""
        delta = self.delta
        if delta is None:
            return True
        if delta.content is None and delta.reasoning_content is None:
            return False
        return bool(delta.content or delta.reasoning_content) or delta.role is None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class StreamReader:
    """Takes the events of one answer in order and fills the record. No I/O; raises RequestFailed."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.done = False
        self._has_usage = False
        self._text: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    def take(self, data: bytes, now_s: float) -> None:
        """The data of one event that arrived at `now_s`."""
        if self.done:
            raise RequestFailed("the stream goes on after [DONE]")
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.DecodeError as error:
            raise RequestFailed(f"an event is not an OpenAI chunk ({error}): {data[:200]!r}") from error
        if chunk.error is not None:
            raise RequestFailed(f"error event: {error_text(chunk.error)}")
        if chunk.choices:
            self._take_choice(chunk.choices[0], chunk.usage, now_s)
        if chunk.usage is not None:
            self._take_usage(chunk.usage)

    def _take_choice(self, choice: _Choice, usage: _Usage | None, now_s: float) -> None:
        record = self.record
        if choice.finish_reason is not None:
            record.finish_reason = choice.finish_reason
        if choice.token_ids is not None:
            num_tokens: int | None = len(choice.token_ids)
        elif usage is not None and record.chunk_tokens[-1:] != [None]:  # a running total in every chunk
            num_tokens = usage.completion_tokens - record.output_tokens
        else:
            num_tokens = None
        if num_tokens == 0 or not choice.may_hold_tokens():
            return
        record.chunk_times_s.append(now_s)
        record.chunk_tokens.append(num_tokens)
        if choice.delta is None:
            self._text.append(choice.text or "")
        else:
            self._text.append(choice.delta.content or "")

    def _take_usage(self, usage: _Usage) -> None:
        self._has_usage = True
        self.record.prompt_tokens = usage.prompt_tokens
        self.record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0

    def finish(self, num_asked: int) -> None:
        """At the end of the stream: raises RequestFailed unless the answer is complete and `num_asked` tokens long."""
        record = self.record
        if record.finish_reason is None:
            raise RequestFailed(f"the stream ended without finish_reason after {len(record.chunk_times_s)} chunks")
        if not self.done:
            raise RequestFailed("the stream ended without [DONE]")
        if not self._has_usage:
            raise RequestFailed("the stream has no usage though include_usage was asked: tokens cannot be counted")
        if record.output_tokens != num_asked:
            raise RequestFailed(
                f"{record.output_tokens} output tokens where ignore_eos and {num_asked} tokens were asked "
                f"(finish_reason {record.finish_reason})"
            )
        if not record.chunk_times_s:
            raise RequestFailed("no chunk of the stream held a token")


def error_text(error: Any) -> str:
    """The message inside an OpenAI error object, a body that holds one, or whatever came instead; bounded."""
    if isinstance(error, bytes):
        try:
            error = msgspec.json.decode(error)
        except msgspec.DecodeError:
            error = error.decode(errors="replace")
    for key in ("error", "message"):
        if isinstance(error, dict) and key in error:
            error = error[key]
    return str(error)[:MAX_ERROR_CHARS]
