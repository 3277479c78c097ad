"""The JSON that clients of the Anthropic API get: one struct for each object. /openapi.json is made of the same."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...core.errors import RequestError
from ..openai.answers import encode_json

MESSAGES_PATH = "/v1/messages"


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """`signature`: always empty, nothing checks what comes back."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct):
    """Prompt tokens are those that were computed (`input_tokens`) and those that were not (`cache_read...`)."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Message(msgspec.Struct):
    """`stop_sequence`: the one that ended it."""

    id: str
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class CountedTokens(msgspec.Struct):
    input_tokens: int


class EventDelta(msgspec.Struct):
    """More of a block: `type` text_delta, thinking_delta or input_json_delta, and the field of that name. Without a
    type it is what a message ended with.
    """

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class StreamEvent(msgspec.Struct):
    """Any event of a stream but an error."""

    type: str
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: EventDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class AnthropicError(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct):
    error: AnthropicError
    request_id: str | UnsetType = UNSET
    type: Literal["error"] = "error"


_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_error(error: RequestError, request_id: str | UnsetType = UNSET) -> AnthropicErrorAnswer:
    """What a client is told with an HTTP status, or as the last event of a stream."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return AnthropicErrorAnswer(AnthropicError(kind, str(error)), request_id)


def sse_event(value: StreamEvent | AnthropicErrorAnswer) -> bytes:
    """One server-sent event, named by its type."""
    return f"event: {value.type}\ndata: ".encode() + encode_json(value) + b"\n\n"
