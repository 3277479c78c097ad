"""Predicted answer lengths and peaks: by literals, and against a simulation token by token."""

import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.growth import UNKNOWN_GROWTH, AnswerLengths, Peak

REQUESTS = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 60)), max_size=12)
REQUEST = st.tuples(st.integers(1, 90), st.integers(0, 60))


def learned(*answers: tuple[int, bool]) -> AnswerLengths:
    lengths = AnswerLengths()
    for num_tokens, was_cut in answers:
        lengths.learn(num_tokens, was_cut=was_cut)
    return lengths


# ---- lengths -------------------------------------------------------------------------------------------------------


def test_nothing_is_known_at_first() -> None:
    lengths = learned(*[(10, False)] * 15)
    assert lengths.remaining(0, 10_000) == UNKNOWN_GROWTH
    assert lengths.remaining(100, 10_000) == UNKNOWN_GROWTH
    assert lengths.remaining(100, 130) == 30


def test_four_of_five_answers_are_no_longer_than_predicted() -> None:
    lengths = learned(*((n, False) for n in range(10, 210, 10)))  # 20 answers: 10, 20 ... 200
    assert lengths.remaining(0, 10_000) == 160
    assert lengths.remaining(0, 100) == 100
    # Ten answers are longer than 100; four of five of those are no longer than 180.
    assert lengths.remaining(100, 10_000) == 80
    assert lengths.remaining(195, 10_000) == 5
    assert lengths.remaining(200, 10_000) == UNKNOWN_GROWTH  # none was longer


def test_the_last_answers_count() -> None:
    lengths = learned(*[(1000, False)] * 300, *[(10, False)] * 256)
    assert lengths.remaining(0, 10_000) == 10


def test_answers_that_were_cut_are_no_short_answers() -> None:
    """Sixty requests for 16 tokens say nothing of those who ask for more: 20 of them got 500 by themselves."""
    lengths = learned(*[(16, True)] * 60, *[(500, False)] * 20)
    assert lengths.remaining(0, 16) == 16
    assert lengths.remaining(0, 4000) == 500


def test_where_all_are_cut_max_tokens_is_the_length_that_is_known() -> None:
    lengths = learned(*((n, True) for n in range(100, 2100, 100)))
    assert lengths.remaining(0, 1500) == 1500
    assert lengths.remaining(0, 9000) == 2000
    assert lengths.remaining(1990, 9000) == UNKNOWN_GROWTH


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60), st.integers(1, 60))
def test_the_predicted_length_never_falls_and_max_tokens_is_kept(
    answers: list[tuple[int, bool]], max_tokens: int
) -> None:
    lengths = learned(*answers)
    predicted = [n + lengths.remaining(n, max_tokens) for n in range(max_tokens)]
    assert predicted == sorted(predicted)
    assert all(n < total <= max_tokens for n, total in enumerate(predicted))


# ---- peaks ---------------------------------------------------------------------------------------------------------


def simulated_blocks(requests: list[tuple[int, int]], block_size: int) -> int:
    """The most blocks ever held, growing all by a token a step until each ends."""
    steps = range(max((remaining for _, remaining in requests), default=-1) + 1)
    return max(
        (sum(-(-(tokens + t) // block_size) for tokens, remaining in requests if t <= remaining) for t in steps),
        default=0,
    )


def test_no_requests() -> None:
    assert Peak([], 16).blocks == 0
    assert Peak([], 16).blocks_with(159, 1) == 10
    assert Peak([], 16).blocks_with(160, 1) == 11
    assert Peak([], 16).blocks_now_with(160) == 10


def test_the_worst_moment_is_before_an_end() -> None:
    """Blocks of one token. 10 + 30 alone reach 40; another of 50 that ends after 5 steps: 15 + 55 = 70."""
    peak = Peak([(10, 30), (50, 5)], 1)
    assert peak.blocks == 70
    assert peak.blocks_with(20, 0) == 80  # it has ended before the others grow: 10 + 50 + 20
    assert peak.blocks_with(20, 5) == 95  # 15 + 55 + 25
    assert peak.blocks_with(1, 60) == 76  # 15 + 55 + 6 after five steps; at its own end it is alone with 61
    assert peak.blocks_with(1, 100) == 101
    assert peak.blocks_with(100, 100) == 200


def test_staggered_requests_need_less_than_the_sum_of_their_ends() -> None:
    """Ten requests that end one after the other, each 100 tokens at its end."""
    requests = [(100 - remaining, remaining) for remaining in range(0, 100, 10)]
    assert Peak(requests, 1).blocks == simulated_blocks(requests, 1) == 550
    assert sum(tokens + remaining for tokens, remaining in requests) == 1000


@given(REQUESTS, REQUEST)
def test_single_token_blocks_are_exact(requests: list[tuple[int, int]], newcomer: tuple[int, int]) -> None:
    peak = Peak(requests, 1)
    assert peak.blocks == simulated_blocks(requests, 1)
    assert peak.blocks_with(*newcomer) == simulated_blocks([*requests, newcomer], 1)


@given(REQUESTS, REQUEST, st.sampled_from([2, 16, 64]))
def test_blocks_are_never_promised_twice(
    requests: list[tuple[int, int]], newcomer: tuple[int, int], block_size: int
) -> None:
    everybody = [*requests, newcomer]
    predicted = Peak(requests, block_size).blocks_with(*newcomer)
    real = simulated_blocks(everybody, block_size)
    assert real <= predicted <= real + len(everybody)
    assert predicted == Peak(everybody, block_size).blocks
    now = sum(-(-tokens // block_size) for tokens, _ in everybody)
    assert now <= Peak(requests, block_size).blocks_now_with(newcomer[0]) <= now + len(everybody)


@given(REQUESTS, REQUEST, st.integers(0, 20), st.integers(0, 20))
def test_more_never_needs_less(
    requests: list[tuple[int, int]], newcomer: tuple[int, int], tokens: int, remaining: int
) -> None:
    peak = Peak(requests, 16)
    larger = (newcomer[0] + tokens, newcomer[1] + remaining)
    assert peak.blocks <= peak.blocks_with(*newcomer) <= peak.blocks_with(*larger)


@pytest.mark.parametrize(("num_requests", "bound_us"), [(256, 1500.0), (1024, 6000.0)])
def test_the_peak_is_cheap(num_requests: int, bound_us: float) -> None:
    """Ten times what it took on the machine that this was written on, so that only another order of cost fails."""
    random = Random(1)
    requests = [(random.randrange(4000), random.randrange(2000)) for _ in range(num_requests)]
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        Peak(requests, 16).blocks_with(1000, 500)
        best = min(best, time.perf_counter() - began)
    assert best * 1e6 < bound_us
