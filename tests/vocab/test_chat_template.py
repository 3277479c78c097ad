import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from baton.core.errors import ConfigurationError, RequestError
from baton.vocab.chat_template import ChatTemplate
from baton.vocab.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hi <b>ä</b>"}]


@pytest.fixture(scope="session")
def tokenizer(byte_level: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(byte_level.to_str().encode(), None)


def render(template: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    return ChatTemplate(template, {"bos_token": "<s>"}).render(messages or HELLO, **variables)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hi <b>ä</b>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <b>ä</b>"}]'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}'),
        # a block tag takes the blanks before it and the line end after it along
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(4) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "013"),
        ("{% generation %}said{{ 1 + 1 }}{% endgeneration %}!", "said2!"),
        ("{% set ns = namespace(n=0, self=1) %}{% set ns.n = 5 %}{{ ns.n + ns.self }}", "6"),
        ("{{ add_generation_prompt }} {{ tools is none }} {{ documents is none }}", "True True True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if unknown %}x{% endif %}{{ unknown }}", ""),
    ],
)
def test_what_templates_rely_on(template: str, expected: str) -> None:
    assert render(template) == expected


def test_variables_reach_the_template_but_cannot_replace_the_messages() -> None:
    tools = [{"name": "f"}]
    assert render("{{ tools[0].name }}{{ x }}", tools=tools, x=3) == "f3"
    assert render("{{ messages[0].role }}{{ self is mapping }}", messages=None, **{"self": 1}) == "userFalse"
    template = ChatTemplate("{{ messages[0].role }} {{ add_generation_prompt }}")
    assert template.render(HELLO, False, **{"messages": "stolen"}) == "user False"


@pytest.mark.parametrize("roles", [["user", "user"], ["system"], ["judge"]])
def test_the_templates_own_refusal_reaches_the_client(roles: list[str]) -> None:
    template = (
        "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
        "{{ raise_exception('Roles must alternate, not ' + m.role) }}{% endif %}{% endfor %}"
    )
    with pytest.raises(RequestError) as caught:
        render(template, [{"role": role, "content": ""} for role in roles])
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert "Roles must alternate, not " + roles[-1] in str(caught.value)


def test_a_refusal_is_bounded() -> None:
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception(messages[0].content) }}", [{"role": "user", "content": "x" * 10**6}])
    assert len(str(caught.value)) < 600


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        ("{{ 'a' + messages[0].content }}", [{"role": "user", "content": [{"type": "text"}]}]),
        ("{{ 'a' + messages[0].content }}", [{"role": "user"}]),
        ("{{ messages[0].content.upper() }}", [{"role": "user", "content": None}]),
        ("{{ messages[5].content.x }}", HELLO),
        ("{{ messages | tojson }}", [{"role": "user", "content": nested(100_000)}]),
        ("{{ 1 / 0 }}", HELLO),
        ("{{ ''.__class__.__mro__[1].__subclasses__()[0].x }}", HELLO),
        ("{% set ns = namespace(__init__=1) %}", HELLO),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", HELLO),
        ("{% set _ = messages.append(1) %}", HELLO),
        ("{% for i in range(10 ** 9) %}{% endfor %}", HELLO),
    ],
)
def test_other_failures_are_the_requests_fault_and_show_nothing_inside(
    template: str, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(RequestError) as caught:
        render(template, messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert str(caught.value) == (
        "The model's chat template cannot be applied to these messages. "
        "Give every message a role the model knows and a text as content."
    )


@pytest.mark.parametrize("template", ["{% if %}", "{{ x", "{% unknown_tag %}", "{% generation %}"])
def test_an_invalid_template_is_found_at_load(template: str) -> None:
    with pytest.raises(ConfigurationError, match="not valid jinja2"):
        ChatTemplate(template)


def from_folder(folder: Path, tokenizer: Tokenizer, **config: Any) -> ChatTemplate | None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTemplate.from_folder(folder, tokenizer)


def rendered(template: ChatTemplate | None) -> str:
    assert template is not None
    return template.render(HELLO)


def test_where_the_template_is_found(tmp_path: Path, tokenizer: Tokenizer) -> None:
    both = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert rendered(from_folder(tmp_path, tokenizer, chat_template="c{{ eos_token }}", eos_token="</s>")) == "c</s>"
    assert rendered(from_folder(tmp_path, tokenizer, chat_template=both)) == "d"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "j"}')
    assert rendered(from_folder(tmp_path, tokenizer, chat_template="c")) == "j"
    (tmp_path / "chat_template.jinja").write_text("f{{ bos_token }}")
    token = {"content": "<s>", "lstrip": False}
    assert rendered(from_folder(tmp_path, tokenizer, chat_template="c", bos_token=token)) == "f<s>"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match=r"chat_template\.jinja"):
        ChatTemplate.from_folder(tmp_path, tokenizer)


def test_a_template_that_is_no_text_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigurationError, match="chat_template is no text"):
        from_folder(tmp_path, tokenizer, chat_template={"a": 1})


def test_without_a_template_chatml_only_where_its_tokens_are(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = ChatTemplate.from_folder(tmp_path, tokenizer)
    assert template is not None
    conversation = [*HELLO, {"role": "assistant", "content": "Yes"}]
    expected = "<|im_start|>user\nHi <b>ä</b><|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
    assert template.render(conversation, add_generation_prompt=False) == expected
    assert template.render(conversation) == expected + "<|im_start|>assistant\n"
    plain = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    plain.decoder = decoders.ByteLevel()
    assert ChatTemplate.from_folder(tmp_path, Tokenizer(plain.to_str().encode(), None)) is None
