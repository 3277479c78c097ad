"""What the events of a stream add up to is the whole answer, however the text was cut: Responses and Messages."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.request import SamplingParams
from baton.gateway.anthropic.format import MessagesFormat
from baton.gateway.deltas import Content, Delta, FinishedChoice, Piece, Reasoning, ToolCallPiece
from baton.gateway.generation import Unavailable
from baton.gateway.openai.answers import PromptTokensDetails, Usage
from baton.gateway.openai.request import ChatPrompt, ParsedRequest
from baton.gateway.responses.fields import ResponsesRequest
from baton.gateway.responses.format import ResponsesFormat, begun_response

USAGE = Usage(10, 4, 14, PromptTokensDetails(3))
REQUEST = ParsedRequest(prompt=ChatPrompt(()), sampling=SamplingParams(), max_tokens=None)
TEXT = st.text(min_size=1, max_size=6)
# What an answer is: (kind, text), and for a call its arguments; neighbours may be of one kind.
PARTS = st.lists(
    st.one_of(
        st.tuples(st.just("thought"), TEXT),
        st.tuples(st.just("text"), TEXT),
        st.tuples(st.just("call"), st.dictionaries(TEXT, TEXT, max_size=2).map(json.dumps)),
    ),
    max_size=5,
)


def cut(draw: Any, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    bounds = [0, *places, len(text)]
    return [text[start:stop] for start, stop in pairwise(bounds) if start < stop]


@st.composite
def answers(draw: Any) -> tuple[list[list[Piece]], str]:
    """(pieces of each delta, why it ended)."""
    pieces: list[Piece] = []
    num_calls = 0
    for kind, text in draw(PARTS):
        if kind == "call":
            pieces.append(ToolCallPiece(num_calls, f"call_{num_calls}", "f"))
            pieces += [ToolCallPiece(num_calls, arguments=part) for part in cut(draw, text)]
            num_calls += 1
        else:
            pieces += [(Content if kind == "text" else Reasoning)(part) for part in cut(draw, text)]
    deltas: list[list[Piece]] = [[]]
    for piece in pieces:
        if draw(st.booleans()):
            deltas.append([])
        deltas[-1].append(piece)
    return deltas, draw(st.sampled_from(["tool_calls" if num_calls else "stop", "length"]))


def stream_of(format: Any, deltas: list[list[Piece]], reason: str) -> list[Any]:
    """The events of a stream."""
    raw = format.first(0, USAGE)
    raw += b"".join(format.delta(Delta(0, pieces, [1]), None) for pieces in deltas)
    raw += format.last(Delta(0, [], [], reason), None) + format.end(USAGE)
    return [json.loads(block.split("data: ")[1]) for block in raw.decode().removesuffix("\n\n").split("\n\n")]


def whole_of(format: Any, deltas: list[list[Piece]], reason: str) -> Any:
    pieces = [piece for delta in deltas for piece in delta]
    return json.loads(format.whole([FinishedChoice(0, pieces, [1], reason, [1])], USAGE))


@pytest.fixture(scope="module")
def responses_format(tokenizer: Any) -> Any:
    def make() -> ResponsesFormat:
        response = begun_response("resp_1", "m", ResponsesRequest(input="hi"), None)
        return ResponsesFormat(response, REQUEST, tokenizer, lambda whole: None)

    return make


def built_items(events: list[Any]) -> list[Any]:
    """The items that the events of a response build, each put together from its deltas."""
    items: dict[int, Any] = {}
    for event in events:
        index = event.get("output_index")
        match event["type"]:
            case "response.output_item.added":
                assert index == len(items)
                items[index] = event["item"]
            case "response.content_part.added":
                items[index]["content"].append(event["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                items[index]["content"][event["content_index"]]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[index]["arguments"] += event["delta"]
            case "response.content_part.done":
                assert items[index]["content"] == [event["part"]]
            case "response.output_text.done" | "response.reasoning_text.done":
                assert items[index]["content"][0]["text"] == event["text"]
            case "response.function_call_arguments.done":
                assert items[index]["arguments"] == event["arguments"]
            case "response.output_item.done":
                items[index]["status"] = event["item"]["status"]
                assert items[index] == event["item"]
    return [items[index] for index in sorted(items)]


@given(answer=answers())
@settings(deadline=None, max_examples=150)
def test_a_response(responses_format: Any, answer: tuple[list[list[Piece]], str]) -> None:
    deltas, reason = answer
    whole = whole_of(responses_format(), deltas, reason)
    events = stream_of(responses_format(), deltas, reason)
    last = events[-1]["response"]
    for told in (whole, last):
        told.pop("created_at")
        told.pop("completed_at")
    assert last == whole
    assert built_items(events) == whole["output"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == ("response.incomplete" if reason == "length" else "response.completed")
    statuses = [item["status"] for item in whole["output"]]
    assert statuses[:-1] == ["completed"] * (len(statuses) - 1)
    assert statuses[-1] == whole["status"]
    told_text = "".join(
        part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"]
    )
    assert told_text == "".join(p.text for delta in deltas for p in delta if isinstance(p, Content))
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == responses_tokens(whole)


def responses_tokens(whole: Any) -> int:
    """One token a byte, at most: the tiny tokenizer knows few words."""
    thoughts = [part["text"] for item in whole["output"] if item["type"] == "reasoning" for part in item["content"]]
    told = int(whole["usage"]["output_tokens_details"]["reasoning_tokens"])
    assert bool(told) is bool(thoughts)
    assert told <= len("".join(thoughts).encode())
    return told


def built_blocks(events: list[Any]) -> list[Any]:
    """The blocks that the events of a message build."""
    blocks: list[Any] = []
    arguments = ""
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            is_open, arguments = True, ""
        elif event["type"] == "content_block_delta":
            assert is_open
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                blocks[-1][name] += delta[name]
        elif event["type"] == "content_block_stop":
            assert event["index"] == len(blocks) - 1
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(arguments)
    assert not is_open
    return blocks


@given(answer=answers())
@settings(deadline=None, max_examples=150)
def test_a_message(answer: tuple[list[list[Piece]], str]) -> None:
    deltas, reason = answer
    whole = whole_of(MessagesFormat("msg_1", "m"), deltas, reason)
    events = stream_of(MessagesFormat("msg_1", "m"), deltas, reason)
    assert built_blocks(events) == whole["content"]
    start, end = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"], start["usage"]) == ([], None, whole["usage"])
    assert end["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert end["usage"] == whole["usage"]
    assert whole["stop_reason"] == {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reason]
    assert events[-1] == {"type": "message_stop"}


def test_what_was_cut_off_in_a_call_has_no_input() -> None:
    pieces: list[Piece] = [ToolCallPiece(0, "call_0", "f"), ToolCallPiece(0, arguments='{"city": "Os')]
    whole = whole_of(MessagesFormat("msg_1", "m"), [pieces], "length")
    assert whole["content"] == [{"type": "tool_use", "id": "call_0", "name": "f", "input": {}}]
    assert whole["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(("status", "code"), [(503, "server_error"), (429, "rate_limit_exceeded")])
def test_a_response_that_fails_before_its_first_text(responses_format: Any, status: int, code: str) -> None:
    raw = responses_format().failed(Unavailable("no worker is left", status)).decode()
    events = [json.loads(block.split("data: ")[1]) for block in raw.removesuffix("\n\n").split("\n\n")]
    kinds = ["response.created", "response.in_progress", "response.failed"]
    assert [event["type"] for event in events] == kinds
    assert events[-1]["response"]["error"] == {"code": code, "message": "no worker is left"}
