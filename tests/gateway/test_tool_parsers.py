"""Calls of tools and reasoning in growing text: what is told, and that it does not depend on the chunks."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.deltas import Content, PieceParser, PlainText, Reasoning, ToolCallPiece
from baton.gateway.tools.call_reader import CallRules
from baton.gateway.tools.json_scanner import JsonScanner
from baton.gateway.tools.parsers import CallParser
from baton.gateway.tools.reasoning import ReasoningParser
from baton.vocab.tool_format import HERMES, LLAMA3, ToolFormat

NAMES = ("get_weather", "f", "naïve")


def parser(
    format: ToolFormat = HERMES, held: int = 512, most_calls: int | None = None, reasoning: bool = False
) -> PieceParser:
    ids = itertools.count()
    rules = CallRules(NAMES, held, lambda: f"call_{next(ids)}")
    calls = CallParser(format, rules, most_calls)
    return ReasoningParser(calls, is_inside=False) if reasoning else calls


def read(parser: PieceParser, chunks: list[str]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """(content, reasoning, [(id, name, arguments)]); checks that the stream of pieces is well formed."""
    content = reasoning = ""
    calls: list[tuple[str, str, str]] = []
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)] + parser.finish()
    for piece in pieces:
        match piece:
            case Content(text):
                assert text
                content += text
            case Reasoning(text):
                assert text
                reasoning += text
            case ToolCallPiece(index, str(call_id), str(name), arguments):
                assert index == len(calls)
                calls.append((call_id, name, arguments))
            case ToolCallPiece(index, None, None, arguments):
                assert index == len(calls) - 1
                calls[-1] = (*calls[-1][:2], calls[-1][2] + arguments)
            case _:
                pytest.fail(f"an odd piece: {piece}")
    return content, reasoning, calls


ONE = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "x}\\""]}}\n</tool_call>'

CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, ONE, "", [("f", '{"a": [1, "x}\\""]}')]),
    (HERMES, f"Let me see.\n{ONE}\n", "Let me see.", [("f", '{"a": [1, "x}\\""]}')]),
    (HERMES, f"{ONE}\n{ONE}", "", [("f", '{"a": [1, "x}\\""]}')] * 2),
    (HERMES, f"{ONE} and then", "and then", [("f", '{"a": [1, "x}\\""]}')]),
    (HERMES, '<tool_call>{"arguments": {}, "name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"name": "g"}', "", [("f", '{"name": "g"}')]),
    (HERMES, '<tool_call>{"name": "f", "id": 7, "arguments": {}, "x": 1.5}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "na\\u00efve", "arguments": {}}</tool_call>', "", [("naïve", "{}")]),
    # AP12: half of a surrogate pair is good JSON as an escape and stays one
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800\\u0000"}}', "", [("f", '{"a": "\\ud800\\u0000"}')]),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA3, 'So: <|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "So:", [("f", "{}")]),
    (LLAMA3, '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', "", [("f", "{}")] * 2),
    (LLAMA3, '\n{"name": "f", "parameters": {}}\n{"name": "f", "arguments": {}}', "", [("f", "{}")] * 2),
]

# What is no call, and must come out as it is.
PLAIN = [
    (HERMES, "no call at all, {} and < and <tool_cal"),
    (HERMES, "  spaces kept \n\n"),
    (HERMES, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1'),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": 01}</tool_call>'),
    (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'),
    (HERMES, "<tool_call>f(1)</tool_call>"),
    (HERMES, "a <tool_call> <tool_call> b </tool_call>"),
    (HERMES, '{"name": "f", "arguments": {}}'),
    (HERMES, "<tool_call>"),
    (LLAMA3, '{"answer": 42}'),
    (LLAMA3, '{"name": "g", "parameters": {}}'),
    (LLAMA3, 'I say {"name": "f", "parameters": {}}'),
    (LLAMA3, "<|python_tag|>print(1)"),
    (LLAMA3, "{"),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
def test_calls_come_out(format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    told = [(f"call_{index}", *call) for index, call in enumerate(calls)]
    assert read(parser(format), [text]) == (content, "", told)
    assert read(parser(format), list(text)) == (content, "", told)


@pytest.mark.parametrize(("format", "text"), PLAIN)
def test_what_is_no_call_stays_as_it_is(format: ToolFormat, text: str) -> None:
    assert read(parser(format), [text]) == (text, "", [])
    assert read(parser(format), list(text)) == (text, "", [])


def test_a_call_inside_what_failed_is_found() -> None:
    content, _, calls = read(parser(), [f"write <tool_call>{ONE}"])
    assert (content, len(calls)) == ("write <tool_call>", 1)


def test_constrained_arguments_come_piece_by_piece() -> None:
    """Nothing is held when a grammar guarantees the call; id and name come once, before the arguments."""
    reading = parser(held=0)
    told = [piece for character in ONE for piece in reading.push(character)] + reading.finish()
    assert told[0] == ToolCallPiece(0, "call_0", "f")
    assert [piece.arguments for piece in told[1:]] == list('{"a": [1, "x}\\""]}')


def test_long_arguments_are_not_held_to_the_end() -> None:
    reading = parser(held=16)
    head = '<tool_call>{"name": "f", "arguments": '
    assert reading.push(head + '{"a": "0123456') == []
    assert [piece for piece in reading.push("7890123") if isinstance(piece, ToolCallPiece)] != []


def test_an_answer_that_ends_in_a_constrained_call_keeps_what_came() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "unfin'
    assert read(parser(held=0), [text]) == ("", "", [("call_0", "f", '{"a": "unfin')])


def test_calls_beyond_the_most_are_text() -> None:
    content, _, calls = read(parser(most_calls=1), [f"{ONE}\n{ONE}"])
    assert (content, len(calls)) == (ONE, 1)
    content, _, calls = read(parser(LLAMA3, most_calls=1), ['{"name": "f", "parameters": {}};{"name": "f"}'])
    assert (content, len(calls)) == ('{"name": "f"}', 1)


THOUGHTS = [
    ("<think>\nhm\n\n</think>\n\nYes", "hm", "Yes"),
    ("<think></think>Yes", "", "Yes"),
    ("\n<think> a < b </thin k> </think>", "a < b </thin k>", ""),
    ("<think>never ends ", "never ends", ""),
    ("Yes <think>no</think>", "", "Yes <think>no</think>"),
    ("<thin", "", "<thin"),
    ("  ", "", "  "),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), THOUGHTS)
def test_reasoning(text: str, reasoning: str, content: str) -> None:
    for chunks in ([text], list(text)):
        assert read(ReasoningParser(PlainText(), is_inside=False), chunks) == (content, reasoning, [])


def test_reasoning_that_the_prompt_began() -> None:
    for text in ("hm\n</think>\nYes", "<think>hm\n</think>\nYes"):
        for chunks in ([text], list(text)):
            assert read(ReasoningParser(PlainText(), is_inside=True), chunks) == ("Yes", "hm", [])
    assert read(ReasoningParser(PlainText(), is_inside=True), ["hm", " hm"]) == ("", "hm hm", [])
    assert read(ReasoningParser(PlainText(), is_inside=True), ["<th"]) == ("", "<th", [])


def test_a_call_after_reasoning() -> None:
    assert read(parser(reasoning=True), [f"<think>{ONE}</think>{ONE}"])[1:] == (
        ONE,
        [("call_0", "f", '{"a": [1, "x}\\""]}')],
    )


FRAGMENTS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", ONE, '{"name": "f", "parameters":']
FRAGMENTS += ['{"name": "f", "arguments": {"k": [true, -1.5e3, null]}}', "{", "}", " ", "\n", ";", '"', "\\", "<", "tx"]
FRAGMENTS += ['{"a": 1}', '"name": "f"', ", ", "1", "[", "]", ":", "é", "😀"]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@given(texts, st.data(), st.sampled_from([HERMES, LLAMA3]), st.sampled_from([0, 3, 20, 512]), st.booleans())
def test_pieces_do_not_depend_on_chunks(
    text: str, data: st.DataObject, format: ToolFormat, held: int, reasoning: bool
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = read(parser(format, held, reasoning=reasoning), [text])
    assert read(parser(format, held, reasoning=reasoning), chunks) == whole
    assert read(parser(format, held, reasoning=reasoning), list(text)) == whole


@given(texts, st.sampled_from([HERMES, LLAMA3]))
def test_no_character_is_lost(text: str, format: ToolFormat) -> None:
    """Without calls the text is what came; calls of text that was held are good JSON."""
    content, _, calls = read(parser(format), [text])
    if not calls:
        assert content == text
    for _, name, arguments in calls:
        assert name in NAMES
        assert isinstance(json.loads(arguments), dict)
    assert "".join(content.split()) in "".join(text.split()) or calls


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, st.sampled_from([None, 1]), st.booleans())
def test_the_scanner_takes_all_json(value: object, indent: int | None, ascii: bool) -> None:
    scanner = JsonScanner()
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    for character in text[:-1]:
        assert scanner.push(character)
        assert not scanner.is_complete
    assert scanner.push(text[-1])
    assert scanner.is_complete or text[-1].isdigit()


@given(st.text(alphabet='{}[]":,.-+eE019 truefalsn\\/x\n\x01', max_size=12))
def test_the_scanner_takes_nothing_else(text: str) -> None:
    scanner = JsonScanner()
    taken = all(scanner.push(character) and not scanner.is_complete for character in text[:-1])
    if taken and text and scanner.push(text[-1]) and scanner.is_complete:
        json.loads(text)
