"""Which way of calling tools goes with a chat template, and what templates are given that know no tools."""

from typing import Any

import pytest

from baton.vocab.chat_template import ChatTemplate
from baton.vocab.tool_format import HERMES, LLAMA3, Tool, ToolFormat, calls_grammar, described_in_text

PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ '\\n' }}{% endfor %}"
QWEN = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools><tool_call>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}:{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
)
LLAMA = "{% if tools is not none %}{{ tools | length }} tools, say <|python_tag|>\n{% endif %}" + PLAIN
TOOL = Tool("f", "Does <it>", {"type": "object", "properties": {}})
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Wait.", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}]},
    {"role": "tool", "content": "1", "tool_call_id": "x"},
    {"role": "tool", "content": "2", "tool_call_id": "y"},
    {"role": "user", "content": "so?"},
]


@pytest.mark.parametrize(("template", "format"), [(PLAIN, HERMES), (QWEN, HERMES), (LLAMA, LLAMA3)])
def test_the_format_follows_the_template(template: str, format: ToolFormat) -> None:
    assert ChatTemplate(template).tool_format is format


@pytest.mark.parametrize(("text", "thinks"), [("", False), ("{{ '</think>' }}", True)])
def test_models_that_think(text: str, thinks: bool) -> None:
    assert ChatTemplate(PLAIN + text).thinks is thinks


def test_a_template_that_knows_tools_gets_everything() -> None:
    rendered = ChatTemplate(QWEN).render_with_tools(HISTORY, [TOOL.as_json])
    assert rendered.startswith('<tools>{"type": "function", "function": {"name": "f", "description": "Does <it>"')
    assert '[assistant] Wait.<call>f:{"a": "é"}\n[tool] 1\n[tool] 2\n[user] so?' in rendered


def test_a_template_without_calls_gets_them_as_text() -> None:
    """It is told of the tools by itself; none is not an empty list."""
    rendered = ChatTemplate(LLAMA).render_with_tools(HISTORY, [TOOL.as_json])
    assert rendered.startswith("1 tools, say <|python_tag|>\n[user] hi\n[assistant] Wait.\n<tool_call>\n")
    assert ChatTemplate(LLAMA).render_with_tools(HISTORY, ()).startswith("[user] hi\n")


def test_a_template_that_knows_nothing() -> None:
    rendered = ChatTemplate(PLAIN).render_with_tools(HISTORY, [TOOL.as_json])
    system, rest = rendered.split("[user] hi\n")
    assert system.startswith("[system] ")
    assert '{"type":"function","function":{"name":"f","description":"Does <it>",' in system
    assert rest == (
        '[assistant] Wait.\n<tool_call>\n{"name":"f","arguments":{"a":"é"}}\n</tool_call>\n'
        "[user] <tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\n"
        "[user] so?\n"
    )
    assert ChatTemplate(PLAIN).render_with_tools(HISTORY[:1], ()) == "[user] hi\n"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_description_joins_the_system_message(role: str) -> None:
    given = [{"role": role, "content": "Be short."}, HISTORY[0]]
    messages = described_in_text(given, [TOOL.as_json], roles_are_known=False)
    assert [message["role"] for message in messages] == [role, "user"]
    assert messages[0]["content"].startswith("Be short.\n\n")
    assert "<tool_call>" in messages[0]["content"]
    assert given[0]["content"] == "Be short."


def test_tools_without_parameters_are_described_as_having_none() -> None:
    assert Tool("f").as_json == {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    ("parameters", "is_closed"),
    [
        (CITY, True),
        (CITY | {"required": ["city"], "title": "Weather", "description": "x"}, True),
        ({"properties": {}}, True),
        (CITY | {"required": ["country"]}, False),  # else nothing would fit
        (CITY | {"additionalProperties": True}, False),
        (CITY | {"patternProperties": {"^x": {}}}, False),
        (CITY | {"allOf": [{"properties": {"country": {}}}]}, False),
        ({"type": "object"}, False),
    ],
)
def test_functions_are_given_the_arguments_they_name(parameters: dict[str, Any], is_closed: bool) -> None:
    """As the client's code would call them: with others it would break. Where others may come, they may."""
    grammar = calls_grammar(HERMES, [(Tool("f", None, parameters), "tools[0]")], allows_several=False)
    assert (r"\"additionalProperties\":false" in grammar) is is_closed
