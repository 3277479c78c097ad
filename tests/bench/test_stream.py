"""StreamReader: which chunks count, how tokens are counted, and what makes an answer a failure."""

import msgspec
import pytest

from baton.bench.record import RequestRecord
from baton.bench.stream import RequestFailed, StreamReader, error_text


def choice(**fields: object) -> dict:
    return {"choices": [{"index": 0, **fields}]}


def chat(delta: dict, finish_reason: str | None = None) -> dict:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def usage(completion_tokens: int, prompt_tokens: int = 9, **fields: object) -> dict:
    return {
        "choices": [],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, **fields},
    }


def read(*chunks: dict | str) -> StreamReader:
    """Chunk i arrives at second i."""
    reader = StreamReader(RequestRecord(session=0, turn=0, send_s=0.0))
    for now, chunk in enumerate(chunks):
        reader.take(chunk.encode() if isinstance(chunk, str) else msgspec.json.encode(chunk), float(now))
    return reader


def test_completions() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    reader = read(
        choice(text=" a", finish_reason=None),
        choice(text=" b", finish_reason="length"),
        usage(2, **details),
        "[DONE]",
    )
    reader.finish(2)
    assert reader.text == " a b"
    record = reader.record
    assert record.chunk_times_s == [0.0, 1.0]
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (9, 4, 2)
    assert record.finish_reason == "length"


def test_a_chat_chunk_that_only_names_role_or_end_is_no_token() -> None:
    reader = read(
        chat({"role": "assistant", "content": ""}),
        chat({"content": "a"}),
        chat({"reasoning_content": "hm"}),
        chat({"content": ""}),  # a token without text, such as half a character
        chat({}, "length"),
        usage(3),
        "[DONE]",
    )
    reader.finish(3)
    assert reader.record.chunk_times_s == [1.0, 2.0, 3.0]
    assert reader.text == "a"


def test_a_first_chat_chunk_may_hold_role_and_text() -> None:
    assert read(chat({"role": "assistant", "content": "a"})).record.chunk_times_s == [0.0]


def test_tokens_of_a_chunk_by_token_ids() -> None:
    reader = read(
        choice(text="abc", token_ids=[1, 2, 3]), choice(text="", token_ids=[]), choice(text="d", token_ids=[4])
    )
    assert reader.record.chunk_times_s == [0.0, 2.0]
    assert reader.record.chunk_tokens == [3, 1]


def test_tokens_of_a_chunk_by_running_usage() -> None:
    chunks = [{**choice(text="x"), **{"usage": usage(n)["usage"]}} for n in (1, 4, 4, 6)]
    reader = read(*chunks)
    assert reader.record.chunk_tokens == [1, 3, 2]
    assert reader.record.chunk_times_s == [0.0, 1.0, 3.0]


def test_a_total_in_the_last_chunk_is_not_taken_for_its_own() -> None:
    reader = read(choice(text="x"), {**choice(text="y", finish_reason="length"), "usage": usage(9)["usage"]}, "[DONE]")
    reader.finish(9)
    assert reader.record.chunk_tokens == [None, None]


def test_null_usage_in_early_chunks() -> None:
    reader = read({**choice(text="x", finish_reason="length"), "usage": None}, usage(1), "[DONE]")
    reader.finish(1)


@pytest.mark.parametrize(
    ("chunks", "asked", "error"),
    [
        ([choice(text="a"), usage(1), "[DONE]"], 1, "without finish_reason after 1 chunks"),
        ([], 1, "without finish_reason after 0 chunks"),
        ([choice(text="a", finish_reason="length"), usage(1)], 1, r"without \[DONE\]"),
        ([choice(text="a", finish_reason="length"), "[DONE]"], 1, "no usage"),
        ([choice(text="a", finish_reason="stop"), usage(1), "[DONE]"], 2, "1 output tokens .* 2 tokens were asked"),
        ([choice(text="a", finish_reason="length"), usage(3), "[DONE]"], 2, "3 output tokens"),
        ([chat({}, "length"), usage(1), "[DONE]"], 1, "no chunk of the stream held a token"),
    ],
)
def test_an_incomplete_answer_is_a_failure(chunks: list[dict | str], asked: int, error: str) -> None:
    reader = read(*chunks)
    with pytest.raises(RequestFailed, match=error):
        reader.finish(asked)


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([{"error": {"message": "worker died", "type": "server_error"}}], "error event: worker died"),
        ([{"error": "plain"}], "error event: plain"),
        (["{"], "not an OpenAI chunk"),
        (['{"choices": 3}'], "not an OpenAI chunk"),
        (["[DONE]", choice(text="a")], r"after \[DONE\]"),
    ],
)
def test_a_wrong_event_is_a_failure(chunks: list[dict | str], error: str) -> None:
    with pytest.raises(RequestFailed, match=error):
        read(*chunks)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (b'{"error": {"message": "too long", "code": 1}}', "too long"),
        (b'{"message": "old style"}', "old style"),
        (b"<html>502</html>", "<html>502</html>"),
        (b"", ""),
        (b"[1]", "[1]"),
        (b"x" * 9999, "x" * 500),
    ],
)
def test_error_texts(error: bytes, text: str) -> None:
    assert error_text(error) == text
