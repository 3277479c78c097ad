"""Text of a choice: the same for every way in which its tokens can arrive."""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.request import FinishReason, SamplingParams
from baton.core.timeline import Timeline
from baton.gateway.choices import Choice
from baton.gateway.deltas import Content, Delta, PlainText
from baton.gateway.generation import Generation
from baton.gateway.openai.request import TextRules
from baton.gateway.prompts import Prompt
from baton.vocab.tokenizer import Tokenizer


def generation(stop_token_ids: tuple[int, ...] = ()) -> Generation:
    prompt = Prompt([5], SamplingParams(max_tokens=1000, stop_token_ids=stop_token_ids))
    return Generation("key", prompt, "ns", asyncio.Event(), Timeline(), 0.0)


def new_choice(tokenizer: Tokenizer, g: Generation, **rules: Any) -> Choice:
    return Choice(0, g, g, tokenizer, TextRules(**rules), PlainText())


def text_of(delta: Delta) -> str:
    return "".join(piece.text for piece in delta.pieces if isinstance(piece, Content))


def run(
    tokenizer: Tokenizer, token_ids: list[int], sizes: list[int], stop: list[str], stop_token_ids: tuple[int, ...] = ()
) -> tuple[str, str, int, list[str]]:
    """(text, finish reason, completion tokens, deltas) when tokens arrive in chunks of `sizes` (then the rest)."""
    g = generation(stop_token_ids)
    choice = new_choice(tokenizer, g, stop=tuple(stop))
    deltas, rest = [], list(token_ids)
    for size in [*sizes, len(token_ids)]:
        g.output_token_ids += rest[:size]
        rest = rest[size:]
        if not rest and g.finish_reason is None:
            ended = bool(g.output_token_ids) and g.output_token_ids[-1] in stop_token_ids
            g.finish(FinishReason.STOP if ended else FinishReason.LENGTH)
        delta = choice.advance()
        if delta is not None:
            deltas.append(text_of(delta))
    finished = choice.finished()
    assert "".join(deltas) == finished.text
    return finished.text, finished.finish_reason, choice.completion_tokens, deltas


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_chunks_do_not_matter(tokenizer: Tokenizer, data: Any) -> None:
    token_ids = data.draw(st.lists(st.integers(3, 319), min_size=1, max_size=30))
    text = tokenizer.decode(token_ids)
    stop = data.draw(st.lists(st.text("abc é", min_size=1, max_size=3), max_size=2))
    if text:
        at = data.draw(st.integers(0, len(text) - 1))
        stop.append(text[at : at + data.draw(st.integers(1, 4))])
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=30))
    together = run(tokenizer, token_ids, [], stop)
    one_by_one = run(tokenizer, token_ids, [1] * len(token_ids), stop)
    mixed = run(tokenizer, token_ids, sizes, stop)
    assert together[:3] == one_by_one[:3] == mixed[:3]
    assert not any(s in together[0] for s in stop)
    assert text.startswith(together[0])


def test_the_end_token_is_no_text_but_counts(tokenizer: Tokenizer) -> None:
    letter = tokenizer.encode("a")[0]
    assert run(tokenizer, [letter, 9, 7], [], [], (7,))[:3] == (tokenizer.decode([letter, 9]), "stop", 3)
    assert run(tokenizer, [7], [], [], (7,))[:3] == ("", "stop", 1)
    # The same token is text where it ends nothing.
    assert run(tokenizer, [letter, 7], [], [])[:3] == (tokenizer.decode([letter, 7]), "length", 2)


def test_a_stop_string_counts_tokens_up_to_its_end(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("one STOP two")
    until_stop = len(tokenizer.encode("one STOP"))
    text, reason, completion_tokens, _ = run(tokenizer, token_ids, [], ["STOP"])
    assert (text, reason) == ("one ", "stop")
    assert completion_tokens <= until_stop + 1


def test_no_half_characters(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("世界🏃")
    deltas = run(tokenizer, token_ids, [1] * len(token_ids), [])[3]
    assert all("\N{REPLACEMENT CHARACTER}" not in delta for delta in deltas)
    assert "".join(deltas) == "世界🏃"


@pytest.mark.parametrize("reason", list(FinishReason))
def test_an_unfinished_character_is_told_at_the_end(tokenizer: Tokenizer, reason: FinishReason) -> None:
    g = generation()
    choice = new_choice(tokenizer, g)
    g.output_token_ids += tokenizer.encode("世")[:1]
    delta = choice.advance()
    assert delta is not None
    assert (text_of(delta), delta.finish_reason) == ("", None)  # a token has come, its text is not certain yet
    assert choice.advance() is None
    g.finish(reason)
    delta = choice.advance()
    assert delta is not None
    assert (text_of(delta), delta.finish_reason) == ("\N{REPLACEMENT CHARACTER}", reason)
    assert choice.advance() is None
