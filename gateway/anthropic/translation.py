"""A request of the Anthropic API as a chat request. Errors name the fields as they came."""

from collections.abc import Sequence
from typing import Any

from ...core.errors import RequestError
from ..field_names import FieldNames
from ..openai.fields import (
    CalledFunction,
    ChatCompletionRequest,
    ChatMessage,
    ChosenTools,
    ContentPart,
    FunctionDefinition,
    JsonSchemaFormat,
    MessageToolCall,
    NamedFunction,
    ResponseFormat,
    ToolDefinition,
)
from ..openai.json_errors import bounded
from ..openai.refused import refuse_unsupported
from .fields import CountTokensRequest, InputBlock, InputMessage, MessagesRequest, OutputFormat, ToolChoice, ToolParam

NAMES = FieldNames(
    {
        r"response_format\.json_schema\.schema": "output_config.format.schema",
        r"response_format\.json_schema": "output_config.format.schema",
        "response_format": "output_config.format",
        "continue_final_message": "messages",
        "stop": "stop_sequences",
        r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
        r"tools\[(\d+)\]\.function": r"tools[\1]",
    }
)
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(fields: CountTokensRequest) -> ChatCompletionRequest:
    """With what is generated too, when `fields` say it. Raises RequestError for what Baton does not do."""
    refuse_unsupported(fields)
    if not fields.messages:
        raise RequestError("messages is empty: send at least one message", "messages")
    choice = fields.tool_choice
    chat = ChatCompletionRequest(
        messages=_messages(fields),
        model=fields.model,
        continue_final_message=fields.messages[-1].role == "assistant" or None,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools or [])],
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_format(fields),
        chat_template_kwargs=_template_kwargs(fields),
    )
    if isinstance(fields, MessagesRequest):
        chat.max_tokens = fields.max_tokens
        chat.stop = fields.stop_sequences
        chat.stream = fields.stream
        chat.temperature, chat.top_p, chat.top_k = fields.temperature, fields.top_p, fields.top_k
    return chat


def _messages(fields: CountTokensRequest) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    if fields.system:
        messages.append(ChatMessage("system", _text_content(fields.system, "system")))
    call_ids: set[str] = set()
    for index, message in enumerate(fields.messages):
        at = f"messages[{index}]"
        if message.role == "assistant":
            messages.append(_assistant_message(message, at, call_ids))
        elif message.role == "user":
            messages += _user_messages(message, at, call_ids)
        else:
            raise RequestError(f"{at}.role must be user or assistant; what the system says is `system`", f"{at}.role")
    return messages


def _assistant_message(message: InputMessage, at: str, call_ids: set[str]) -> ChatMessage:
    """`call_ids` is given those of the calls in it."""
    if isinstance(message.content, str):
        return ChatMessage("assistant", message.content)
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[MessageToolCall] = []
    for index, block in enumerate(message.content):
        where = f"{at}.content[{index}]"
        match block.type:
            case "text":
                texts.append(ContentPart("text", _needed(block.text, f"{where}.text")))
            case "thinking":
                thoughts.append(_needed(block.thinking, f"{where}.thinking"))
            case "redacted_thinking":  # of another server's model; nobody here can read it
                pass
            case "tool_use":
                call_id, name = _needed(block.id, f"{where}.id"), _needed(block.name, f"{where}.name")
                calls.append(MessageToolCall(CalledFunction(name, block.input or {}), call_id))
                call_ids.add(call_id)
            case _:
                raise _unsupported(block, where)
    thought = "\n".join(thoughts) if thoughts else None
    return ChatMessage("assistant", texts or "", tool_calls=calls or None, reasoning_content=thought)


def _user_messages(message: InputMessage, at: str, call_ids: set[str]) -> list[ChatMessage]:
    """Results of calls are messages of their own; texts that follow each other are one."""
    if isinstance(message.content, str):
        return [ChatMessage("user", message.content)]
    messages: list[ChatMessage] = []
    texts: list[ContentPart] = []
    for index, block in enumerate(message.content):
        where = f"{at}.content[{index}]"
        match block.type:
            case "text":
                if not texts:
                    messages.append(ChatMessage("user", texts))
                texts.append(ContentPart("text", _needed(block.text, f"{where}.text")))
            case "tool_result":
                messages.append(_result_message(block, where, call_ids))
                texts = []
            case _:
                raise _unsupported(block, where)
    return messages or [ChatMessage("user", "")]


def _result_message(block: InputBlock, at: str, call_ids: set[str]) -> ChatMessage:
    call_id = _needed(block.tool_use_id, f"{at}.tool_use_id")
    if call_id not in call_ids:
        raise RequestError(
            f"{at}.tool_use_id: no tool_use before it has the id {bounded(call_id, 80)!r}", f"{at}.tool_use_id"
        )
    return ChatMessage("tool", _text_content(block.content or "", f"{at}.content"), tool_call_id=call_id)


def _text_content(content: str | Sequence[InputBlock], at: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = []
    for index, block in enumerate(content):
        if block.type != "text":
            raise _unsupported(block, f"{at}[{index}]")
        parts.append(ContentPart("text", _needed(block.text, f"{at}[{index}].text")))
    return parts


def _tool(tool: ToolParam, at: str) -> ToolDefinition:
    if tool.type not in (None, "custom"):
        raise RequestError(f"{at}.type: only tools of the client's own ('custom') are supported", f"{at}.type")
    if tool.input_schema is None:
        raise RequestError(f"{at}.input_schema is missing", f"{at}.input_schema")
    return ToolDefinition(FunctionDefinition(tool.name, tool.description, tool.input_schema))


def _tool_choice(choice: ToolChoice) -> str | ChosenTools:
    if choice.type == "tool":
        return ChosenTools(NamedFunction(_needed(choice.name, "tool_choice.name")))
    if choice.type not in _CHOICES:
        raise RequestError("tool_choice.type must be auto, any, tool or none", "tool_choice.type")
    return _CHOICES[choice.type]


def _format(fields: CountTokensRequest) -> ResponseFormat | None:
    if fields.output_config is None:
        return None
    refuse_unsupported(fields.output_config, "output_config.")
    format: OutputFormat | None = fields.output_config.format
    if format is None:
        return None
    if format.type != "json_schema":
        raise RequestError("output_config.format.type must be json_schema", "output_config.format.type")
    return ResponseFormat(format.type, JsonSchemaFormat(format.schema))


def _template_kwargs(fields: CountTokensRequest) -> dict[str, Any] | None:
    """`enable_thinking`, as templates of models that may think or not call it."""
    if fields.thinking is None:
        return None
    if fields.thinking.type not in _THINKING:
        raise RequestError(f"thinking.type must be one of {', '.join(_THINKING)}", "thinking.type")
    return {"enable_thinking": _THINKING[fields.thinking.type]}


def _needed(value: str | None, param: str) -> str:
    if value is None:
        raise RequestError(f"{param} is missing", param)
    return value


def _unsupported(block: InputBlock, at: str) -> RequestError:
    return RequestError(
        f"{at}.type: blocks of type {bounded(block.type, 80)!r} are not supported here",
        f"{at}.type",
        "unsupported_parameter",
    )
