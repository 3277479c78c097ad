"""The JSON that clients get: one struct for each object of the API. /openapi.json is made of the same structs.

UNSET fields are left out; fields that clients index without looking (`finish_reason`, `logprobs`) are always there.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...core.errors import RequestError

_encode = msgspec.json.Encoder().encode

SSE_DONE = b"data: [DONE]\n\n"
SSE_KEEP_ALIVE = b": keep-alive\n\n"


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: prompt tokens that no worker computed for this request."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts of one answer, over all its choices; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


# ---- /v1/completions -------------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    """Four lists of one length. A token that is no whole character is spelled `bytes:\\xe4\\xb8`.

    `top_logprobs` always holds the token itself too. `text_offset`: where in the choice's text the token begins.
    The first token of a prompt has null in the middle two.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """A whole answer, and each chunk of a streamed one; the chunk with the usage has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET


# ---- /v1/chat/completions --------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct):
    """`bytes`: what the token adds to the text, so those of the chosen tokens join to it; [] for an end token. A stop
    string is in them even where it was cut off the text: its tokens were generated.
    """

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """`arguments` is JSON as text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionCallDelta(msgspec.Struct):
    """The name comes whole and once, the arguments in pieces."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct):
    """`id` and `type` come with the first delta of a call only."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta = msgspec.field(default_factory=FunctionCallDelta)


class MessageDelta(msgspec.Struct):
    """`role` comes with the first delta of a choice only."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct):
    """The chunk with the usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET


# ---- the rest --------------------------------------------------------------------------------------------------------


class Model(msgspec.Struct):
    """`max_model_len`: tokens a request may have in all. `vocab_size`: width of the logits."""

    id: str
    created: int
    max_model_len: int
    vocab_size: int
    object: Literal["model"] = "model"
    owned_by: str = "baton"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


class Version(msgspec.Struct):
    version: str


class ErrorObject(msgspec.Struct):
    """`param`: the field at fault, as the client spelled it."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct):
    error: ErrorObject


_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


def error_answer(message: str, status: int, param: str | None = None, code: str | None = None) -> ErrorAnswer:
    """What a client is told with an HTTP status, or as the last event of a stream."""
    return ErrorAnswer(ErrorObject(message, _ERROR_TYPES.get(status, "invalid_request_error"), param, code))


def answer_of(error: RequestError) -> ErrorAnswer:
    return error_answer(str(error), error.status, error.param, error.code)


def encode_json(value: Any) -> bytes:
    return _encode(value)


def sse(value: Any) -> bytes:
    """One server-sent event with `value` as JSON (which never holds a raw line break)."""
    return b"data: " + _encode(value) + b"\n\n"
