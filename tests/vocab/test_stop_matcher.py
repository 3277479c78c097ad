import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.vocab.stop import StopMatcher

LETTERS = "ab "


def naive(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The definition: the text ends where the first stop string is complete, the longest of equals counts."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@st.composite
def chunked_texts(draw: st.DrawFn) -> list[str]:
    text = draw(st.text(LETTERS, max_size=30))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(chunks=chunked_texts(), stop=st.lists(st.text(LETTERS, min_size=1, max_size=6), max_size=4))
def test_any_chunks_give_what_the_whole_text_gives(chunks: list[str], stop: list[str]) -> None:
    expected, matched = naive("".join(chunks), stop)
    matcher = StopMatcher(stop)
    emitted, read = "", ""
    for chunk in chunks:
        read += chunk
        text, stopped = matcher.push(chunk)
        emitted += text
        assert expected.startswith(emitted)  # nothing is shown that would have to be taken back
        if stopped:
            break
        held = read[len(emitted) :]  # and no more is held back than could still become a stop string
        assert held == "" or any(s.startswith(held) for s in stop)
    emitted += matcher.flush()
    assert (emitted, matcher.matched) == (expected, matched)


@pytest.mark.parametrize("size", range(1, 12))
def test_a_stop_string_over_several_chunks(size: int) -> None:
    text, stop = "one END two", "END"
    matcher = StopMatcher([stop])
    emitted = ""
    for start in range(0, len(text), size):
        part, stopped = matcher.push(text[start : start + size])
        emitted += part
        if stopped:
            break
    assert (emitted, matcher.matched) == ("one ", "END")
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_a_start_that_leads_nowhere_comes_out_at_once() -> None:
    matcher = StopMatcher(["</s>", "\n\nUser:"])
    assert matcher.push("a</") == ("a", False)
    assert matcher.push("b\n\nUs") == ("</b", False)
    assert matcher.push("e") == ("", False)
    assert matcher.flush() == "\n\nUse"


def test_overlapping_starts() -> None:
    matcher = StopMatcher(["aab"])
    assert [matcher.push(c) for c in "aaa"] == [("", False), ("", False), ("a", False)]
    assert matcher.push("b") == ("", True)


def test_without_stop_strings_nothing_is_held_back() -> None:
    matcher = StopMatcher([])
    assert matcher.push("any text") == ("any text", False)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(["a", ""])
