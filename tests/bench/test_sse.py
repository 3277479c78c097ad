"""SSEParser: events by literals, and independence of where the stream is cut."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.bench import sse
from baton.bench.sse import SSEParser


def parse(*pieces: bytes) -> list[bytes]:
    parser = SSEParser()
    return [data for piece in pieces for data in parser.feed(piece)]


def test_two_events_in_one_piece() -> None:
    assert parse(b"data: a\n\ndata: b\n\n") == [b"a", b"b"]


def test_an_event_is_out_only_when_its_blank_line_is_in() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == [b"a"]


def test_comments_and_other_fields_are_dropped() -> None:
    assert parse(b": keep-alive\n\nevent: x\nid: 7\nretry: 1\ndata: a\n\n: again\n\n") == [b"a"]


def test_several_data_lines_are_joined() -> None:
    assert parse(b"data: a\ndata:b\ndata\ndata:  c\n\n") == [b"a\nb\n\n c"]


def test_an_event_without_its_blank_line_is_not_an_event() -> None:
    assert parse(b"data: a\n\ndata: [DONE]\n") == [b"a"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end_of_the_standard(end: bytes) -> None:
    assert parse(b"data: a" + end + end + b"data: b" + end + end) == [b"a", b"b"]


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_PENDING_BYTES", 100)
    parser = SSEParser()
    for _ in range(8):
        parser.feed(b"data: 12345\n")  # 12 bytes each
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        parser.feed(b"data: 12345\n")


def test_a_long_stream_of_small_events_is_not_an_endless_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_PENDING_BYTES", 100)
    assert len(parse(*[b"data: 12345\n\n"] * 50)) == 50


LINES = st.sampled_from(["data: x", "data:é", "data", ": ping", "event: e", "", "", "data: {}", "nonsense"])


@given(
    st.lists(st.tuples(LINES, st.sampled_from(["\n", "\r\n", "\r"])), max_size=12),
    st.lists(st.integers(0, 120), max_size=12),
)
@example([("data: x", "\r\n"), ("", "\r\n"), ("data: y", "\n"), ("", "\n")], [8, 9, 10, 11])
@example([("data: x", "\r"), ("", "\n"), ("", "\n")], [8])
def test_the_result_does_not_depend_on_the_cuts(lines: list[tuple[str, str]], cuts: list[int]) -> None:
    stream = "".join(line + end for line, end in lines).encode()
    borders = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:stop] for start, stop in pairwise(borders)]

    expected: list[bytes] = []
    pending: list[str] | None = None
    for line in stream.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]:
        if line == "data" or line.startswith("data:"):
            pending = [*(pending or []), line[5:].removeprefix(" ")]
        elif line == "" and pending is not None:
            expected.append("\n".join(pending).encode())
            pending = None

    assert parse(*pieces) == expected
