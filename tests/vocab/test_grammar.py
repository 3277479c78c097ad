"""Grammars: what requests may ask for, what is refused, and that whatever comes out satisfies what was asked for."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import ConfigurationError, RequestError
from baton.vocab.grammar import GrammarCompiler, GrammarError
from baton.vocab.grammar_source import (
    MAX_GRAMMAR_BYTES,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from baton.vocab.tokenizer import Tokenizer
from baton.vocab.tool_format import HERMES, LLAMA3, Tool, ToolFormat, calls_grammar

LINES = (Path(__file__).parent.parent / "data" / "schemas.jsonl").read_text(encoding="utf-8").splitlines()
CASES = [json.loads(line) for line in LINES]
SUPPORTED = [case for case in CASES if case["supported"]]
REFUSED = [case for case in CASES if not case["supported"]]
VOCAB_SIZE = 320
EOS = 2
MOST_TOKENS = 1500


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model, VOCAB_SIZE, (EOS,))


def allowed(row: np.ndarray) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


@pytest.fixture(scope="module")
def walk(tokenizer: Tokenizer, compiler: GrammarCompiler) -> Callable[[str, int], str | None]:
    """A random answer of a grammar, from a "model" that soon wants to end; None when it does not."""
    closers = {token_id for token_id in range(VOCAB_SIZE) if tokenizer.token_bytes(token_id) in (b'"', b"}", b"]")}

    def answer(grammar: str, seed: int) -> str | None:
        matcher = compiler.matcher(grammar)
        choose = random.Random(seed)
        row = np.zeros(compiler.mask_words, np.int32)
        token_ids: list[int] = []
        while len(token_ids) < MOST_TOKENS:
            matcher.fill(row)
            candidates = allowed(row)
            weights = [100 if token_id in closers or token_id == EOS else 1 for token_id in candidates]
            (token_id,) = choose.choices(candidates, weights)
            matcher.advance(token_id)
            if token_id == EOS:
                assert matcher.is_complete
                return tokenizer.decode(token_ids)
            token_ids.append(token_id)
        return None

    return answer


def refusal(compiler: GrammarCompiler, schema: Any) -> str | None:
    try:
        return compiler.check(json_schema_grammar(schema, "schema"))
    except RequestError as error:
        return str(error)


def test_there_are_120_schemas() -> None:
    assert len(CASES) >= 120
    assert len({json.dumps(case["schema"]) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: str(case["name"]))
def test_every_answer_satisfies_its_schema(case: dict[str, Any], walk: Callable[[str, int], str | None]) -> None:
    grammar = json_schema_grammar(case["schema"], "schema")
    answers = [walk(grammar, seed) for seed in range(4)]
    complete = [answer for answer in answers if answer is not None]
    assert complete, "no answer came to an end"
    for answer in complete:
        jsonschema.validate(json.loads(answer), case["schema"])


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: str(case["name"]))
def test_what_cannot_be_enforced_is_refused_at_once(case: dict[str, Any], compiler: GrammarCompiler) -> None:
    """AP18."""
    started = time.perf_counter()
    assert refusal(compiler, case["schema"])
    assert time.perf_counter() - started < 1


def test_a_client_cannot_loosen_its_schema(compiler: GrammarCompiler) -> None:
    lenient = {"not": {}, "x-guidance": {"lenient": True}}
    assert "not" in (refusal(compiler, lenient) or "")


@pytest.mark.parametrize("schema", ["text", 1, None, [], [{}]])
def test_a_schema_is_an_object(schema: Any) -> None:
    with pytest.raises(RequestError) as caught:
        json_schema_grammar(schema, "schema")
    assert caught.value.param == "schema"


def test_large_and_deep_schemas_are_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="larger"):
        json_schema_grammar({"enum": ["x" * MAX_GRAMMAR_BYTES]}, "schema")
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(2_000):
        deep = {"type": "array", "items": deep}
    assert refusal(compiler, deep)


@pytest.mark.parametrize("piece", ["\n", " ", "\t \n", "a", "-a", "a ", "<", "\n\n<a", "a:", "\u2028"])
def test_a_text_costs_no_more_than_its_length(piece: str) -> None:
    """It is looked at on the gateway's event loop: blank lines once cost their square, 100 kB of them five minutes."""
    text = (piece * MAX_GRAMMAR_BYTES)[: MAX_GRAMMAR_BYTES // 9]
    started = time.process_time()
    for make in (lark_grammar, regex_grammar):
        make(text, "the_field")
        with pytest.raises(RequestError, match="larger than"):
            make(text * 100, "the_field")
    assert time.process_time() - started < 1


def test_white_space_is_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Pretty and compact layouts are both allowed, blank lines without end are not."""
    grammar = json_object_grammar()

    def accepts(text: str) -> bool:
        matcher = compiler.matcher(grammar)
        try:
            for token_id in tokenizer.encode(text):
                matcher.advance(token_id)
        except GrammarError:
            return False
        return matcher.is_accepting

    value = {"a": [1, {"b": None}], "c": "d"}
    assert accepts(json.dumps(value))
    assert accepts(json.dumps(value, indent=4))
    assert accepts(json.dumps(value, separators=(",", ":")))
    assert not accepts('{\n\n"a": 1}')
    assert not accepts("[1]")
    assert not accepts('{"a": "\\ud800"}')  # AP12: no half of a surrogate pair can be generated


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6), st.integers(0, 100))
def test_choices(walk: Callable[[str, int], str | None], choices: list[str], seed: int) -> None:
    assert walk(choice_grammar(choices, "choice"), seed) in choices


@pytest.mark.parametrize("choices", [[], [""], ["a", ""], ["x"] * 1025])
def test_choices_are_bounded(choices: list[str]) -> None:
    with pytest.raises(RequestError):
        choice_grammar(choices, "choice")


def test_a_regular_expression_matches_the_whole_answer(walk: Callable[[str, int], str | None]) -> None:
    assert {walk(regex_grammar(r"(yes|no)/[0-9]{2}", "regex"), seed)[:3] for seed in range(20)} == {"yes", "no/"}  # type: ignore[index]
    assert walk(regex_grammar(r"^a$", "regex"), 0) == "a"


@pytest.mark.parametrize("pattern", ["foo**(", "(?=a)b", "(", "[z-a]", r"(a)\1"])
def test_an_invalid_expression_is_refused(pattern: str, compiler: GrammarCompiler) -> None:
    assert compiler.check(regex_grammar(pattern, "regex"))


def test_lark(walk: Callable[[str, int], str | None], compiler: GrammarCompiler) -> None:
    assert walk(lark_grammar('start: "a" number\nnumber: /[0-9]{3}/', "grammar"), 1)[:1] == "a"  # type: ignore[index]
    for wrong in ("", "start: nothing", 'start: start "a"', "start: <nope>", "%import x", '{"grammars": []}'):
        assert compiler.check(lark_grammar(wrong, "grammar")), wrong
    for other in ('root ::= "a"', '\n  my-rule::= "a"', 'start: "a"\n<b> ::= "b"'):
        with pytest.raises(RequestError, match="Lark"):
            lark_grammar(other, "grammar")


def test_texts_may_hold_what_other_grammars_are_known_by(walk: Callable[[str, int], str | None]) -> None:
    assert walk(choice_grammar(["a ::= b"], "choice"), 0) == "a ::= b"
    assert walk(regex_grammar("a ::= b", "regex"), 0) == "a ::= b"
    assert walk(lark_grammar('start: "a ::= b"', "grammar"), 0) == "a ::= b"
    tool = Tool("f", None, {"type": "object", "properties": {}, "description": "root ::= it"})
    assert walk(calls_grammar(HERMES, [(tool, "tools[0]")], allows_several=False), 0)


@pytest.mark.parametrize("grammar", ["", "{}", "no grammar", '{"grammars": [{}]}', "\x00"])
def test_what_was_never_made_here_is_an_error(grammar: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError):
        compiler.matcher(grammar).fill(np.zeros(compiler.mask_words, np.int32))


def test_the_end_of_an_answer(tiny_model: Path, tokenizer: Tokenizer) -> None:
    """Where the grammar is complete only end tokens may come; all of them."""
    compiler = GrammarCompiler(tiny_model, VOCAB_SIZE, (2, 0))
    matcher = compiler.matcher(lark_grammar('start: "a" "b"?', "grammar"))
    row = np.full(compiler.mask_words, -1, np.int32)
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    matcher.fill(row)
    assert allowed(row) == [a]
    assert not matcher.is_accepting
    matcher.advance(a)
    matcher.fill(row)
    assert allowed(row) == [0, 2, b]
    assert matcher.is_accepting
    assert not matcher.is_complete
    matcher.advance(b)
    assert matcher.is_complete
    matcher.fill(row)
    assert allowed(row) == [0, 2]
    matcher.advance(0)
    assert matcher.is_complete


def test_copies_go_their_own_ways(compiler: GrammarCompiler) -> None:
    """Each as if it alone had been made, from where the first one was copied."""
    grammar = json_schema_grammar({"type": "array", "items": {"enum": ["ab", "ac", 12, 13]}}, "schema")
    original = compiler.matcher(grammar)
    row, expected = np.zeros(compiler.mask_words, np.int32), np.zeros(compiler.mask_words, np.int32)
    begun: list[int] = []
    for _ in range(2):
        original.fill(row)
        begun.append(allowed(row)[0])
        original.advance(begun[-1])
    copies = [original.copy() for _ in range(4)]
    alone = [compiler.matcher(grammar) for _ in copies]
    for matcher in alone:
        for token_id in begun:
            matcher.advance(token_id)
    choose, taken = random.Random(7), set()
    for _ in range(20):
        for number, (copy, matcher) in enumerate(zip(copies, alone, strict=True)):
            copy.fill(row)
            matcher.fill(expected)
            assert (row == expected).all()
            token_id = choose.choice([token_id for token_id in allowed(row) if token_id != EOS] or [EOS])
            copy.advance(token_id)
            matcher.advance(token_id)
            taken.add((number, token_id))
    assert len({token_id for _, token_id in taken}) > 2


def test_a_token_that_is_not_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(lark_grammar('start: "a"', "grammar"))
    with pytest.raises(GrammarError, match="does not allow"):
        matcher.advance(tokenizer.encode("b")[0])
    with pytest.raises(GrammarError, match="cannot go on"):
        matcher.fill(np.zeros(compiler.mask_words, np.int32))
    assert not matcher.is_complete


@pytest.fixture(scope="module", params=[1, 2])
def batching(request: pytest.FixtureRequest, tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model, VOCAB_SIZE, (EOS,), num_threads=request.param)


def test_masks_of_a_batch_are_those_of_each_alone(batching: GrammarCompiler) -> None:
    compiler = batching
    grammars = [json_schema_grammar(case["schema"], "schema") for case in SUPPORTED[:12]]
    together = np.zeros((14, compiler.mask_words), np.int32)
    matchers = [compiler.matcher(grammar) for grammar in grammars]
    compiler.fill_all(matchers, together)
    for matcher in matchers:
        matcher.check()
    for row, grammar in zip(together, grammars, strict=False):
        alone = np.zeros(compiler.mask_words, np.int32)
        compiler.matcher(grammar).fill(alone)
        assert (row == alone).all()
    assert not together[12:].any()


def test_a_failed_matcher_does_not_hurt_a_batch(batching: GrammarCompiler, tokenizer: Tokenizer) -> None:
    compiler = batching
    grammar = lark_grammar('start: "a"', "grammar")
    failed, fine = compiler.matcher(grammar), compiler.matcher(grammar)
    with pytest.raises(GrammarError):
        failed.advance(tokenizer.encode("b")[0])
    bitmask = np.zeros((2, compiler.mask_words), np.int32)
    compiler.fill_all([failed, fine], bitmask)
    with pytest.raises(GrammarError):
        failed.check()
    fine.check()
    assert allowed(bitmask[1]) == tokenizer.encode("a")


WEATHER = Tool(
    "get_weather",
    None,
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ['a"', "b\x7f", "日\n"]}},
    },
)
CLOCK = Tool('odd"name')


@pytest.mark.parametrize("format", [HERMES, LLAMA3], ids=lambda format: str(format.name))
def test_calls_satisfy_their_tools(format: ToolFormat, walk: Callable[[str, int], str | None]) -> None:
    """Each schema's references are its own; a tool without parameters takes none."""
    grammar = calls_grammar(format, [(WEATHER, "tools[0]"), (CLOCK, "tools[1]")], allows_several=True)
    called = set()
    for seed in range(30):
        text = walk(grammar, seed)
        assert text is not None
        for part in text.split(f"{format.end}{format.separator}" if not format.is_bare else format.separator):
            call = json.loads(part.removeprefix(format.begin).removesuffix(format.end))
            assert list(call) == ["name", format.arguments_key]
            schema = {"get_weather": WEATHER.parameters, 'odd"name': {"maxProperties": 0}}[call["name"]]
            jsonschema.validate(call[format.arguments_key], schema)
            called.add(call["name"])
    assert called == {"get_weather", 'odd"name'}


def test_arguments_are_one_object() -> None:
    with pytest.raises(RequestError) as caught:
        calls_grammar(HERMES, [(Tool("f", None, {"type": "array"}), "tools[3].p")], allows_several=False)
    assert caught.value.param == "tools[3].p.type"


def test_the_tokenizer_knows_an_end_token_too(tiny_model: Path) -> None:
    matcher = GrammarCompiler(tiny_model, VOCAB_SIZE, ()).matcher(lark_grammar('start: "a"?', "grammar"))
    row = np.zeros(10, np.int32)
    matcher.fill(row)
    assert EOS in allowed(row)


def test_a_model_without_an_end_token_has_no_grammars(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigurationError, match="eos_token_id"):
        GrammarCompiler(tmp_path, VOCAB_SIZE, ())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        GrammarCompiler(tmp_path, VOCAB_SIZE, (EOS,))
