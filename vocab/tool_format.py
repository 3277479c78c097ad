"""How a model calls tools, told by its chat template; and prompts for models whose template knows no tools.

hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>: Hermes, Qwen, and everything else
llama3   {"name": "f", "parameters": {...}} as the whole answer: Llama 3
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..core.errors import RequestError
from .grammar_source import checked_schema, lark_grammar, literal

MAX_CALLS = 16  # in an answer that must call
# Of a schema of arguments that says of its properties all that it says.
_ANNOTATIONS = ("title", "description", "default", "examples", "$schema", "$comment")
_PLAIN_KEYWORDS = frozenset(("type", "properties", "required", "$defs", "definitions", *_ANNOTATIONS))


class ToolFormat(msgspec.Struct, frozen=True):
    """`begin` and `end` stand around a call. `is_bare`: an answer that is an object is a call without them too, and a
    model is made to write calls so. `separator` stands between calls. `arguments_key`: what the model calls them.
    """

    name: str
    begin: str
    end: str
    separator: str
    arguments_key: str
    is_bare: bool = False


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "\n", "arguments")
LLAMA3 = ToolFormat("llama3", "<|python_tag|>", ";", "; ", "parameters", is_bare=True)


def format_of(template: str | None) -> ToolFormat:
    """How a model with this chat template calls tools."""
    if template is not None and HERMES.begin not in template and LLAMA3.begin in template:
        return LLAMA3
    return HERMES


class Tool(msgspec.Struct, frozen=True):
    """A function that a model may call. `parameters`: JSON schema of its arguments, None: it has none."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def as_json(self) -> dict[str, Any]:
        """As chat templates expect it."""
        described: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            described["description"] = self.description
        described["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": described}


def calls_grammar(format: ToolFormat, tools: Sequence[tuple[Tool, str]], *, allows_several: bool) -> str:
    """An answer that is one call of one of `tools`, or several; arguments always satisfy the tool's schema.

    With each tool comes the field its parameters were sent in. Raises RequestError for a schema that is refused.
    """
    begin, end = ("", "") if format.is_bare else (literal(f"{format.begin}\n"), literal(f"\n{format.end}"))
    several = f" ({literal(format.separator)} call){{0,{MAX_CALLS - 1}}}" if allows_several else ""
    rules = [
        f"start: call{several}",
        f"call: {begin} ({' | '.join(f'call_{i}' for i in range(len(tools)))}) {end}",
    ]
    for index, (tool, param) in enumerate(tools):
        head = literal(f'{{"name": {msgspec.json.encode(tool.name).decode()}, "{format.arguments_key}": ')
        schema = checked_schema(_arguments_schema(tool, param), param)
        rules.append(f"call_{index}: {head} arguments_{index} {literal('}')}")
        rules.append(f"arguments_{index}: %json {msgspec.json.encode(schema).decode()}")
    return lark_grammar("\n".join(rules), "tools")


def _arguments_schema(tool: Tool, param: str) -> dict[str, Any]:
    if tool.parameters is None:
        return {"type": "object", "additionalProperties": False}
    if tool.parameters.get("type", "object") != "object":
        raise RequestError(f"{param}.type must be 'object': arguments are one object", f"{param}.type")
    return {"type": "object", **tool.parameters} | (
        {} if _says_more(tool.parameters) else {"additionalProperties": False}
    )


def _says_more(parameters: Mapping[str, Any]) -> bool:
    """Whether arguments that are not among `properties` may be meant. A function takes those that it names: where
    nothing else is said, others would only break the client's call.
    """
    named = parameters.get("properties")
    if not isinstance(named, dict) or not _PLAIN_KEYWORDS.issuperset(parameters):
        return True
    required = parameters.get("required", [])
    return not (isinstance(required, list) and all(isinstance(name, str) and name in named for name in required))


def described_in_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, roles_are_known: bool
) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: the system message describes them, in the words of Hermes.

    `roles_are_known`: the template shows calls and results of earlier turns by itself; else they become plain text.
    """
    plain = [dict(message) for message in messages] if roles_are_known else _plain_messages(messages)
    if not tools:
        return plain
    if plain and plain[0]["role"] in ("system", "developer"):
        given = plain.pop(0)
        return [given | {"content": f"{given['content']}\n\n{_description(tools)}"}, *plain]
    return [{"role": "system", "content": _description(tools)}, *plain]


def _description(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(msgspec.json.encode(tool).decode() for tool in tools)
    return (
        "You can call functions to help the user. These are their signatures:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, answer with a JSON object that has its name and arguments, between tags:\n"
        f'{HERMES.begin}\n{{"name": <function name>, "arguments": <arguments as JSON object>}}\n{HERMES.end}'
    )


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which calls are text of the assistant and results text of the user.

    Results of several calls become one message: many templates want user and assistant to take turns.
    """
    plain: list[dict[str, Any]] = []
    for before, message in zip([None, *messages], messages, strict=False):
        if message["role"] != "tool":
            plain.append(_plain_message(message))
            continue
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        if before is not None and before["role"] == "tool":
            plain[-1]["content"] += f"\n{result}"
        else:
            plain.append({"role": "user", "content": result})
    return plain


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [
        f"{HERMES.begin}\n{_call_text(call['function'])}\n{HERMES.end}" for call in message.get("tool_calls") or ()
    ]
    if calls:
        plain["content"] = "\n".join([message["content"], *calls] if message["content"] else calls)
    return plain


def _call_text(function: Mapping[str, Any]) -> str:
    return msgspec.json.encode({"name": function["name"], "arguments": function["arguments"]}).decode()
