"""A request of the Responses API as a chat request. Errors name the fields as they came."""

from collections.abc import Sequence

from ...core.errors import RequestError
from ..field_names import FieldNames
from ..openai.fields import (
    AllowedTools,
    ChatCompletionRequest,
    ChatMessage,
    ChosenTools,
    FunctionDefinition,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    ToolDefinition,
)
from ..openai.json_errors import bounded
from ..openai.refused import refuse_unsupported
from .conversation import Conversation
from .fields import AllowedFunction, FunctionChoice, FunctionTool, InputItem, ResponsesRequest, TextFormat

NAMES = FieldNames(
    {
        r"response_format\.json_schema": "text.format",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        r"tools\[(\d+)\]\.function": r"tools[\1]",
        r"tool_choice\.allowed_tools\.tools\[(\d+)\]": r"tool_choice.tools[\1]",
        r"tool_choice\.allowed_tools": "tool_choice",
    }
)
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")  # of the second there is none: reasoning comes as it is


def input_items(fields: ResponsesRequest) -> list[InputItem]:
    """A text is one message of the user."""
    if isinstance(fields.input, str):
        return [InputItem(role="user", content=fields.input)]
    return fields.input


def chat_request(fields: ResponsesRequest, earlier: Sequence[InputItem]) -> ChatCompletionRequest:
    """`earlier`: the conversation that is continued. Raises RequestError for what Baton does not do."""
    refuse_unsupported(fields)
    if fields.text is not None:
        refuse_unsupported(fields.text, "text.")
    if fields.reasoning is not None:
        refuse_unsupported(fields.reasoning, "reasoning.")
    for index, name in enumerate(fields.include or []):
        if name not in _INCLUDABLE:
            raise RequestError(
                f"include[{index}]: {bounded(name, 80)!r} is not supported; leave it out",
                "include",
                "unsupported_parameter",
            )
    return ChatCompletionRequest(
        messages=_messages(fields, earlier),
        model=fields.model,
        max_completion_tokens=fields.max_output_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        seed=fields.seed,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logprobs=bool(fields.top_logprobs) or _LOGPROBS in (fields.include or ()),
        top_logprobs=fields.top_logprobs,
        response_format=_format(fields.text.format if fields.text is not None else None),
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools or [])],
        tool_choice=_tool_choice(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls,
        stream=fields.stream,
        priority=fields.priority,
        service_tier=fields.service_tier,
        cache_salt=fields.cache_salt,
        chat_template_kwargs=fields.chat_template_kwargs,
    )


def _messages(fields: ResponsesRequest, earlier: Sequence[InputItem]) -> list[ChatMessage]:
    """`instructions` are of this request alone, and stand before everything."""
    conversation = Conversation()
    if fields.instructions:
        conversation.add(InputItem(role="system", content=fields.instructions), "instructions")
    for item in earlier:
        conversation.add(item, "previous_response_id")
    for index, item in enumerate(input_items(fields)):
        conversation.add(item, f"input[{index}]")
    return conversation.messages


def _format(format: TextFormat | None) -> ResponseFormat | None:
    if format is None:
        return None
    return ResponseFormat(format.type, JsonSchemaFormat(format.schema, format.name, format.description, format.strict))


def _tool(tool: FunctionTool, at: str) -> ToolDefinition:
    if tool.type != "function":
        raise RequestError(
            f"{at}.type: {bounded(tool.type, 80)!r} is not supported; only 'function' is",
            f"{at}.type",
            "unsupported_parameter",
        )
    if tool.name is None:
        raise RequestError(f"{at}.name is missing", f"{at}.name")
    return ToolDefinition(FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict))


def _tool_choice(choice: str | FunctionChoice | None) -> str | ChosenTools | None:
    if not isinstance(choice, FunctionChoice):
        return choice
    if choice.type == "allowed_tools":
        tools = [_named(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(choice.tools or [])]
        return ChosenTools(type=choice.type, allowed_tools=AllowedTools(choice.mode or "", tools))
    if choice.type != "function" or choice.name is None:
        raise RequestError("tool_choice must be a word, or {'type': 'function', 'name': ...}", "tool_choice")
    return ChosenTools(NamedFunction(choice.name))


def _named(tool: AllowedFunction, at: str) -> NamedTool:
    if tool.type == "function" and tool.name is None:
        raise RequestError(f"{at}.name is missing", f"{at}.name")
    return NamedTool(NamedFunction(tool.name or ""), tool.type)
