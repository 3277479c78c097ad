"""The JSON that clients of the Responses API send. As in openai/fields.py; /openapi.json is made of it."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..openai.fields import MAX_CHAT_LOGPROBS, Refused
from ..urgency import PRIORITIES

# What the documents say; what is refused is told in words by the translation.
_Role = Annotated[str, Meta(extra_json_schema={"enum": ["system", "developer", "user", "assistant"]})]
_ItemType = Annotated[
    str,
    Meta(
        extra_json_schema={
            "enum": ["message", "function_call", "function_call_output", "reasoning", "item_reference"],
        }
    ),
]
_PartType = Annotated[
    str,
    Meta(
        extra_json_schema={
            "enum": ["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"],
        }
    ),
]
_FormatType = Annotated[str, Meta(extra_json_schema={"enum": ["text", "json_object", "json_schema"]})]
_Function = Annotated[str, Meta(extra_json_schema={"enum": ["function"]})]
_ChosenType = Annotated[str, Meta(extra_json_schema={"enum": ["function", "allowed_tools"]})]
_AllowedMode = Annotated[str, Meta(extra_json_schema={"enum": ["auto", "required"]})]
_MetadataKey = Annotated[str, Meta(max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)]


class InputPart(msgspec.Struct):
    """`type`: input_text, output_text, text, summary_text or reasoning_text; or refusal, with that field."""

    type: _PartType
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """A message, function_call, function_call_output or reasoning; items of an earlier answer can be sent back. An
    item_reference stands for the stored item of that `id`.
    """

    type: _ItemType = "message"
    role: _Role | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    id: Annotated[str, Meta(max_length=128)] | None = None


class TextFormat(msgspec.Struct):
    """`type`: text, json_object or json_schema. `strict` makes no difference."""

    type: _FormatType = "text"
    name: Annotated[str, Meta(max_length=256)] | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Refused = None


class ReasoningConfig(msgspec.Struct):
    """A model thinks as its chat template lets it; see `chat_template_kwargs`."""

    effort: Refused = None
    summary: Refused = None
    generate_summary: Refused = None


class FunctionTool(msgspec.Struct):
    """`strict` makes no difference: arguments are constrained whenever a call is required."""

    type: _Function
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedFunction(msgspec.Struct):
    type: _Function
    name: str | None = None


class FunctionChoice(msgspec.Struct, omit_defaults=True):
    """One function by its name; or with type `allowed_tools` those that may be called, and whether one must be."""

    type: _ChosenType
    name: str | None = None
    mode: _AllowedMode | None = None
    tools: list[AllowedFunction] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    service_tier: str | None = None

    # As in chat; OpenAI's API has none of these.
    seed: int | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    priority: Annotated[int, Meta(ge=PRIORITIES[0], le=PRIORITIES[1])] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: Refused = None
    conversation: Refused = None
    context_management: Refused = None
    max_tool_calls: Refused = None
    moderation: Refused = None
    prompt: Refused = None
    truncation: Refused = None
