"""The JSON that clients of the Anthropic API send. As in openai/fields.py; /openapi.json is made of it."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..openai.fields import Refused

# What the documents say; what is refused is told in words by the translation.
_Role = Annotated[str, Meta(extra_json_schema={"enum": ["user", "assistant"]})]
_BlockType = Annotated[
    str, Meta(extra_json_schema={"enum": ["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]})
]
_ToolType = Annotated[str, Meta(extra_json_schema={"enum": ["custom"]})]
_ChoiceType = Annotated[str, Meta(extra_json_schema={"enum": ["auto", "any", "tool", "none"]})]
_ThinkingType = Annotated[str, Meta(extra_json_schema={"enum": ["enabled", "adaptive", "disabled"]})]
_FormatType = Annotated[str, Meta(extra_json_schema={"enum": ["json_schema"]})]


class InputBlock(msgspec.Struct):
    """`type`: text, tool_use, tool_result, thinking or redacted_thinking. `cache_control` is ignored: all is cached."""

    type: _BlockType
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[InputBlock] | None" = None
    is_error: bool | None = None
    thinking: str | None = None


class InputMessage(msgspec.Struct):
    """`role`: user or assistant. The assistant's at the end is continued."""

    role: _Role
    content: str | list[InputBlock]


class ToolParam(msgspec.Struct):
    """A tool of the client's; `type` is custom or absent."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: _ToolType | None = None


class ToolChoice(msgspec.Struct):
    """`type`: auto, any, tool (with its `name`) or none."""

    type: _ChoiceType
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """`type`: enabled, adaptive or disabled, which the chat template is told; how long is left to the model."""

    type: _ThinkingType


class OutputFormat(msgspec.Struct):
    """`type`: json_schema."""

    type: _FormatType
    schema: dict[str, Any] | bool | None = None


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None
    effort: Refused = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[InputBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    mcp_servers: Refused = None
    context_management: Refused = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None

    container: Refused = None
