"""Chat templates with the constructs of each family's own, text and ids, against transformers' apply_chat_template."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from baton.core.errors import RequestError
from baton.vocab.chat_template import ChatTemplate
from baton.vocab.tokenizer import Tokenizer

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "chat_templates"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
WITH_TOOLS = ("llama3_like", "mistral_like", "qwen_like")
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "[INST]",
    "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
]  # fmt: skip
TOOL = {
    "name": "look_up",
    "description": 'Finds <b>words</b> & "more" - ünïcode',
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "n": {"type": "integer"}}},
}
ARGUMENTS = {"word": "ü <é>", "n": 3, "deep": [True, None, {"a": 1.5}]}

SYSTEM = {"role": "system", "content": "Be <brief> & kind.  "}
USER = {"role": "user", "content": "  What is ä?\nTell me. "}
ANSWER = {"role": "assistant", "content": "A letter."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "three turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "</s> And <s>[INST]?"}],
    "ends with the assistant": [USER, ANSWER],
    "thoughts": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}],
}


def calling(call: dict[str, Any]) -> list[dict[str, Any]]:
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": '{"found": "ü"}', "tool_call_id": "abcdefghi"}
    return [SYSTEM, USER, message, result]


TOOL_CHATS = {
    "tools": [SYSTEM, USER],
    "a call and its result": calling(
        {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": ARGUMENTS}}
    ),
    "arguments as text": calling(
        {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": json.dumps(ARGUMENTS)}}
    ),
    "a call without the word function": calling({"id": "abcdefghi", "name": "look_up", "arguments": ARGUMENTS}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that puts <s> before every text, as Llama 3's does."""
    folder = tmp_path_factory.mktemp("templates")
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    rust = RustTokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    rust.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    rust.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def check(folder: Path, family: str, messages: list[dict[str, Any]], **variables: Any) -> None:
    """The same text and the same ids, or both refuse."""
    import transformers

    text = (TEMPLATES / f"{family}.jinja").read_text()
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer = Tokenizer.from_folder(folder)
    for ask in (True, False):
        options = {"chat_template": text, "add_generation_prompt": ask, **variables}
        try:
            expected = oracle.apply_chat_template(messages, tokenize=False, **options)
        except Exception:  # jinja2's own errors, of any kind
            with pytest.raises(RequestError):
                template.render(messages, ask, **variables)
            continue
        rendered = template.render(messages, ask, **variables)
        assert rendered == expected
        ids = tokenizer.encode(rendered)
        assert ids == oracle.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        starts_with_bos = family not in ("qwen_like", "phi_like")
        assert ids[:2].count(0) == int(starts_with_bos)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chats(family: str, chat: str, folder: Path) -> None:
    check(folder, family, CHATS[chat])


@pytest.mark.parametrize("chat", TOOL_CHATS)
@pytest.mark.parametrize("family", WITH_TOOLS)
def test_tools(family: str, chat: str, folder: Path) -> None:
    check(folder, family, TOOL_CHATS[chat], tools=[{"type": "function", "function": TOOL}])


def test_variables_reach_a_template(folder: Path) -> None:
    check(folder, "qwen_like", [USER], enable_thinking=False)
    check(folder, "llama3_like", [SYSTEM, USER], date_string="26 Jul 2024")
    tools = [{"type": "function", "function": TOOL}]
    check(folder, "llama3_like", [SYSTEM, USER], tools=tools, tools_in_user_message=False)


def test_content_in_parts(folder: Path) -> None:
    check(folder, "gemma_like", [{"role": "user", "content": [{"type": "text", "text": " Hi "}]}])


def test_families_that_know_no_tools_are_told_in_text(folder: Path) -> None:
    """What the server renders for them: the template never sees a role that it does not know."""
    for family in FAMILIES:
        template = ChatTemplate((TEMPLATES / f"{family}.jinja").read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
        rendered = template.render_with_tools(TOOL_CHATS["tools"], [{"type": "function", "function": TOOL}])
        assert "look_up" in rendered
        if family not in WITH_TOOLS:
            rendered = template.render_with_tools(TOOL_CHATS["a call and its result"], [])
            assert rendered.count("<tool_response>") == 1
