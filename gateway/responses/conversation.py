"""Conversation: items of the Responses API as chat messages.

The assistant's items that follow each other are one message: what it thought, what it said, what it called.
"""

from ...core.errors import RequestError
from ..openai.fields import CalledFunction, ChatMessage, ContentPart, MessageToolCall
from ..openai.json_errors import bounded
from ..openai.messages import decode_arguments
from .fields import InputItem, InputPart

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class Conversation:
    """`messages` are valid for a chat request, but for what only the model's template can judge."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._call_ids: set[str] = set()

    def add(self, item: InputItem, at: str) -> None:
        """The next item; `at`: where in the body it stands. Raises RequestError naming the field that is wrong."""
        match item.type:
            case "message":
                self._add_message(item, at)
            case "function_call":
                self._add_call(item, at)
            case "function_call_output":
                self._add_output(item, at)
            case "reasoning":
                self._add_reasoning(item, at)
            case _:
                raise RequestError(
                    f"{at}.type: items of type {bounded(item.type, 80)!r} are not supported; leave them out",
                    f"{at}.type",
                    "unsupported_parameter",
                )

    def _add_message(self, item: InputItem, at: str) -> None:
        if item.role not in _ROLES:
            raise RequestError(f"{at}.role must be one of {', '.join(_ROLES)}", f"{at}.role")
        content = _content(item.content, f"{at}.content")
        if item.role != "assistant":
            self.messages.append(ChatMessage(item.role, content))
            return
        message = self._assistant()
        if message.content or message.tool_calls:
            message = self._new_assistant()
        message.content = content

    def _add_call(self, item: InputItem, at: str) -> None:
        call_id = _needed(item.call_id, f"{at}.call_id")
        name = _needed(item.name, f"{at}.name")
        arguments = decode_arguments(_needed(item.arguments, f"{at}.arguments"), f"{at}.arguments")
        message = self._assistant()
        message.tool_calls = [
            *(message.tool_calls or ()), MessageToolCall(CalledFunction(name, arguments), call_id)
        ]  # fmt: skip
        self._call_ids.add(call_id)

    def _add_output(self, item: InputItem, at: str) -> None:
        call_id = _needed(item.call_id, f"{at}.call_id")
        if call_id not in self._call_ids:
            raise RequestError(
                f"{at}.call_id: no function_call before it has the id {bounded(call_id, 80)!r}", f"{at}.call_id"
            )
        content = _content(item.output, f"{at}.output")
        self.messages.append(ChatMessage("tool", content, tool_call_id=call_id))

    def _add_reasoning(self, item: InputItem, at: str) -> None:
        parts = item.content if item.content is not None else item.summary
        texts = _content(parts or "", f"{at}.content")
        text = texts if isinstance(texts, str) else "\n".join(part.text or "" for part in texts)
        message = self._assistant()
        if message.content or message.tool_calls:
            message = self._new_assistant()
        message.reasoning_content = (
            text if message.reasoning_content is None else f"{message.reasoning_content}\n{text}"
        )

    def _assistant(self) -> ChatMessage:
        """The assistant's message at the end, a new one when another's is there."""
        if self.messages and self.messages[-1].role == "assistant":
            return self.messages[-1]
        return self._new_assistant()

    def _new_assistant(self) -> ChatMessage:
        self.messages.append(ChatMessage("assistant", ""))
        return self.messages[-1]


def _needed(value: str | None, param: str) -> str:
    if value is None:
        raise RequestError(f"{param} is missing", param)
    return value


def _content(content: str | list[InputPart] | None, param: str) -> str | list[ContentPart]:
    if content is None:
        raise RequestError(f"{param} is missing: send a text", param)
    if isinstance(content, str):
        return content
    return [ContentPart("text", _text(part, f"{param}[{index}]")) for index, part in enumerate(content)]


def _text(part: InputPart, at: str) -> str:
    if part.type == "refusal":
        return _needed(part.refusal, f"{at}.refusal")
    if part.type not in _TEXT_TYPES:
        raise RequestError(
            f"{at}.type: parts of type {bounded(part.type, 80)!r} are not supported, only text is",
            f"{at}.type",
            "unsupported_parameter",
        )
    return _needed(part.text, f"{at}.text")
