"""Scores of a prompt, however it is cut, and whatever is computed twice."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.request import TokenLogprobs
from baton.decode.prompt_scores import PromptScores


def score(token: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token))


@given(st.integers(1, 30), st.data())
def test_every_token_but_the_first_once_and_in_order(length: int, data: st.DataObject) -> None:
    prompt = list(range(100, 100 + length))
    scores, computed = PromptScores(prompt, 2), 0
    while computed < length:
        stop = data.draw(st.integers(computed + 1, length + 2))  # a decode behind the prompt scores nothing
        scores.add(computed, [score(token) for token in scores.targets(computed, stop)])
        computed = stop
        if data.draw(st.booleans()):  # preempted; some of it is found in the cache
            limit = scores.max_cached_tokens
            assert limit is None or limit < length
            computed = data.draw(st.integers(0, min(computed, length if limit is None else limit)))
    assert scores.is_complete
    assert scores.max_cached_tokens is None
    assert scores.read() == [score(token) for token in prompt[1:]]


def test_literals() -> None:
    scores = PromptScores([7, 8, 9, 10], 0)
    assert scores.max_cached_tokens == 0
    assert list(scores.targets(0, 2)) == [8, 9]
    scores.add(0, [score(8), score(9)])
    assert scores.max_cached_tokens == 2
    assert list(scores.targets(1, 4)) == [9, 10]
    scores.add(1, [score(9), score(10)])
    assert scores.read() == [score(8), score(9), score(10)]
    assert PromptScores([7], 0).read() == []
