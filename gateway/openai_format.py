"""What clients get: the JSON of the OpenAI API, whole answers and stream chunks of both endpoints, and errors.

Absent fields are left out, except those that clients index without looking (`finish_reason`, `logprobs`, `usage` in a
stream with usage).
"""

import time
from typing import Any, Protocol

import msgspec

from ..core.errors import RequestError

_encode = msgspec.json.Encoder().encode

SSE_DONE = b"data: [DONE]\n\n"
SSE_KEEP_ALIVE = b": keep-alive\n\n"


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts of one answer. `cached_tokens`: prompt tokens that no worker computed for this request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class FinishedChoice(msgspec.Struct, frozen=True):
    """One whole choice."""

    index: int
    text: str
    finish_reason: str
    token_ids: list[int]
    prompt_token_ids: list[int]


class AnswerFormat(Protocol):
    """How one endpoint spells answers. All results are encoded JSON (whole) or SSE events (the others)."""

    def whole(self, choices: list[FinishedChoice], usage: Usage) -> bytes: ...

    def first(self, index: int) -> bytes:
        """What comes before the first text of a choice; may be empty."""
        ...

    def delta(self, index: int, text: str, token_ids: list[int]) -> bytes: ...

    def last(self, index: int, finish_reason: str) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...


class _Base:
    """Fields common to all objects of one answer.

    `with_usage`: chunks carry `usage: null`, as OpenAI's do. `with_token_ids`: choices carry the ids of their tokens,
    and a whole answer those of its prompt, under the names that vLLM gives them. `service_tier`: None leaves it out.
    """

    object_name: str
    chunk_name: str

    def __init__(
        self,
        answer_id: str,
        model: str,
        *,
        with_usage: bool,
        with_token_ids: bool = False,
        service_tier: str | None = None,
    ):
        self._with_token_ids = with_token_ids
        self._head: dict[str, Any] = {
            "id": answer_id,
            "object": self.chunk_name,
            "created": int(time.time()),
            "model": model,
        }
        if service_tier is not None:
            self._head["service_tier"] = service_tier
        self._tail: dict[str, Any] = {"usage": None} if with_usage else {}

    def _whole(self, choices: list[dict[str, Any]], usage: Usage, more: dict[str, list[int]] | None = None) -> bytes:
        answer = {**self._head, "object": self.object_name, "choices": choices, "usage": usage}
        return _encode(answer | (more or {}))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return sse({**self._head, "choices": [choice], **self._tail})

    def _ids(self, **token_ids: list[int]) -> dict[str, list[int]]:
        return token_ids if self._with_token_ids else {}

    def usage(self, usage: Usage) -> bytes:
        return sse({**self._head, "choices": [], "usage": usage})


class CompletionFormat(_Base):
    """/v1/completions."""

    object_name = chunk_name = "text_completion"

    def whole(self, choices: list[FinishedChoice], usage: Usage) -> bytes:
        return self._whole(
            [
                self._choice(c.index, c.text, c.finish_reason)
                | self._ids(token_ids=c.token_ids, prompt_token_ids=c.prompt_token_ids)
                for c in choices
            ],
            usage,
        )

    def first(self, index: int) -> bytes:
        return b""

    def delta(self, index: int, text: str, token_ids: list[int]) -> bytes:
        return self._chunk(self._choice(index, text, None) | self._ids(token_ids=token_ids))

    def last(self, index: int, finish_reason: str) -> bytes:
        return self._chunk(self._choice(index, "", finish_reason))

    @staticmethod
    def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


class ChatFormat(_Base):
    """/v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def whole(self, choices: list[FinishedChoice], usage: Usage) -> bytes:
        return self._whole(
            [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
                | self._ids(token_ids=choice.token_ids)
                for choice in choices
            ],
            usage,
            self._ids(prompt_token_ids=choices[0].prompt_token_ids),
        )

    def first(self, index: int) -> bytes:
        return self._chunk(self._delta(index, {"role": "assistant", "content": ""}, None))

    def delta(self, index: int, text: str, token_ids: list[int]) -> bytes:
        return self._chunk(self._delta(index, {"content": text}, None) | self._ids(token_ids=token_ids))

    def last(self, index: int, finish_reason: str) -> bytes:
        return self._chunk(self._delta(index, {}, finish_reason))

    @staticmethod
    def _delta(index: int, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


_ERROR_TYPES = {
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


def error_object(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The OpenAI error object."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: RequestError) -> dict[str, Any]:
    return error_object(str(error), error.status, error.param, error.code)


def encode_json(value: Any) -> bytes:
    return _encode(value)


def sse(value: Any) -> bytes:
    """One server-sent event with `value` as JSON (which never holds a raw line break)."""
    return b"data: " + _encode(value) + b"\n\n"
