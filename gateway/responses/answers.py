"""The JSON that clients of the Responses API get: one struct for each object. /openapi.json is made of the same."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..openai.answers import TokenLogprob, encode_json
from .fields import FunctionChoice, FunctionTool, TextConfig

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag="output_text"):
    """`annotations`: there are none."""

    text: str
    logprobs: list[TokenLogprob] = []
    annotations: list[dict[str, Any]] = []


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class FunctionCallItem(msgspec.Struct, tag="function_call"):
    """`arguments` is JSON as text. `call_id` is what its output names."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    """What the model thought before it answered, in full."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[dict[str, Any]] = []
    encrypted_content: None = None


OutputItem = OutputMessage | FunctionCallItem | ReasoningItem
Part = OutputText | ReasoningText


class InputTokensDetails(msgspec.Struct):
    """`cached_tokens`: of the prompt, that no worker computed for this request."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: those that the reasoning's text has, marks left out."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ReasoningEcho(msgspec.Struct):
    effort: None = None
    summary: None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """A whole answer, and what a stream says of it at its beginning and end."""

    id: str
    created_at: int
    model: str
    status: Status
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] = {}
    store: bool = True
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int = 0
    text: TextConfig = msgspec.field(default_factory=TextConfig)
    reasoning: ReasoningEcho = msgspec.field(default_factory=ReasoningEcho)
    tools: list[FunctionTool] = []
    tool_choice: str | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    service_tier: str | None = None
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"


class InputText(msgspec.Struct, tag="input_text"):
    text: str


class ListedMessage(msgspec.Struct, tag="message"):
    """A message of the input, whoever wrote it."""

    id: str
    role: str
    content: list[InputText | OutputText]
    status: ItemStatus = "completed"


class FunctionCallOutputItem(msgspec.Struct, tag="function_call_output"):
    id: str
    call_id: str
    output: str
    status: ItemStatus = "completed"


ListedItem = ListedMessage | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


class InputItemList(msgspec.Struct):
    """What a stored answer answered, from the beginning of its conversation."""

    data: list[ListedItem]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class CountedInput(msgspec.Struct):
    """What a request's prompt has: instructions, tools, what it continues, and the model's template."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseEvent(msgspec.Struct, kw_only=True):
    """Any event of a stream. `output_index`: of the item; `content_index`: of the part in it."""

    type: str
    sequence_number: int = 0
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: Part | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


def sse_event(event: ResponseEvent) -> bytes:
    """One server-sent event, named by its type."""
    return f"event: {event.type}\ndata: ".encode() + encode_json(event) + b"\n\n"
