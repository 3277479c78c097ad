"""The JSON that clients of the Anthropic API send. As in openai/fields.py; /openapi.json is made of it."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..openai.fields import Refused


class InputBlock(msgspec.Struct):
    """`type`: text, tool_use, tool_result, thinking or redacted_thinking. `cache_control` is ignored: all is cached."""

    type: str
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

    role: str
    content: str | list[InputBlock]


class ToolParam(msgspec.Struct):
    """A tool of the client's; `type` is custom or absent."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct):
    """`type`: auto, any, tool (with its `name`) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """`type`: enabled, adaptive or disabled, which the chat template is told; how long is left to the model."""

    type: str


class OutputFormat(msgspec.Struct):
    """`type`: json_schema."""

    type: str
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
