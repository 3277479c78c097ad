"""Chat messages of a request as chat templates expect them, and the variables a request may give to a template."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ...core.errors import RequestError
from ...vocab.tool_format import Tool
from .fields import ChatCompletionRequest, ChatMessage, ContentPart, MessageToolCall, TokenizeRequest
from .refused import refuse_unsupported
from .request import ChatPrompt

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TEMPLATE_BYTES = 16 * 1024  # of chat_template_kwargs, as JSON
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}


def chat_prompt(fields: ChatCompletionRequest | TokenizeRequest, tools: Sequence[Tool]) -> ChatPrompt:
    """`tools`: those the model is told of. Raises RequestError naming the message that no template could be given."""
    messages = fields.messages
    if not messages:
        raise RequestError("messages is empty: send at least one message", "messages")
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; leave one out",
            "continue_final_message",
        )
    plain = tuple(_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages))
    if continues and not plain[-1]["content"]:
        raise RequestError(
            "continue_final_message: the last message has no text to continue; send some", "continue_final_message"
        )
    return ChatPrompt(
        plain,
        add_generation_prompt=not continues and fields.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=_variables(fields.chat_template_kwargs or {}),
        tools=tuple(tool.as_json for tool in tools),
        add_special_tokens=bool(fields.add_special_tokens),
    )


def _plain_message(message: ChatMessage, at: str) -> dict[str, Any]:
    """Content is one text (parts are joined by line breaks), arguments of tool calls are objects."""
    if message.role not in ROLES:
        raise RequestError(f"{at}.role must be one of {', '.join(ROLES)}", f"{at}.role")
    refuse_unsupported(message, f"{at}.")
    calls = [_plain_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or [])]
    if calls and message.role != "assistant":
        raise RequestError(f"{at}.tool_calls: only the assistant calls tools", f"{at}.tool_calls")
    plain: dict[str, Any] = {"role": message.role, "content": _content(message, at, is_needed=not calls)}
    if calls:
        plain["tool_calls"] = calls
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _content(message: ChatMessage, at: str, *, is_needed: bool) -> str:
    content = message.content
    if content is None:
        if is_needed:
            raise RequestError(f"{at}.content is missing: every message needs a text", f"{at}.content")
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{at}.content[{i}]") for i, part in enumerate(content))


def _part_text(part: ContentPart, at: str) -> str:
    if part.type != "text":
        raise RequestError(f"{at}.type: only parts of type 'text' are supported", f"{at}.type")
    if part.text is None:
        raise RequestError(f"{at}.text is missing", f"{at}.text")
    return part.text


def _plain_call(call: MessageToolCall, at: str) -> dict[str, Any]:
    if call.type != "function":
        raise RequestError(f"{at}.type: only 'function' is supported", f"{at}.type")
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = decode_arguments(arguments, f"{at}.function.arguments")
    plain: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return plain if call.id is None else plain | {"id": call.id}


def decode_arguments(text: str, param: str) -> dict[str, Any]:
    """Arguments of a call. Raises RequestError naming `param` when they are no object."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):  # invalid Unicode cannot be in it: the body was decoded
        raise RequestError(f"{param} must be a JSON object, as text", param) from None


def _variables(given: dict[str, Any]) -> dict[str, Any]:
    for name in given:
        if not _NAME.fullmatch(name) or name in _RESERVED or name.endswith("_token"):
            raise RequestError(
                f"chat_template_kwargs: {name[:80]!r} cannot be set; use names of letters, digits and _ that the API "
                "does not use itself",
                "chat_template_kwargs",
            )
    if given and len(msgspec.json.encode(given)) > MAX_TEMPLATE_BYTES:
        raise RequestError(
            f"chat_template_kwargs is larger than {MAX_TEMPLATE_BYTES:,} bytes; send less", "chat_template_kwargs"
        )
    return given
