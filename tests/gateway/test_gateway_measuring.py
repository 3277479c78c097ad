"""What the router learns from requests that have been."""

import pytest

from baton.gateway.forecast import Work
from baton.gateway.measuring import Measuring
from baton.gateway.ways import Measured


def test_nothing_is_known_at_first() -> None:
    assert Measuring(0.05).measured == Measured(0.0, 0.0, 0.05, 1e-4)


def test_a_short_hand_over_counts_as_little_as_its_tokens() -> None:
    measuring = Measuring(None)
    measuring.handed_over(10, 0.01)  # overhead
    measuring.handed_over(9990, 0.1)
    assert measuring.measured.transfer_s == pytest.approx(0.11 / 10_000, rel=0.01)


def test_old_hand_overs_are_forgotten() -> None:
    measuring = Measuring(None)
    measuring.handed_over(50_000, 50.0)
    for _ in range(40):
        measuring.handed_over(50_000, 0.5)
    assert measuring.measured.transfer_s == pytest.approx(1e-5)
    measuring.handed_over(200_000, 4.0)
    assert measuring.measured.transfer_s == pytest.approx(2e-5)


def test_the_mean_answer_is_that_of_the_last_ones() -> None:
    measuring = Measuring(None)
    measuring.answered(100, 0.0)
    measuring.answered(300, 0.0)
    assert measuring.measured.answer_tokens == pytest.approx(200)
    for _ in range(5000):
        measuring.answered(50, 0.0)
    assert measuring.measured.answer_tokens == pytest.approx(50, rel=1e-3)


def test_the_overhead_comes_to_rest_at_the_median_of_what_steps_do_not_explain() -> None:
    measuring = Measuring(None)
    for number in range(600):  # 20 ms are explained; a tenth of all waits long for something else
        rest = 9.0 if number % 10 == 0 else 0.004 + 0.002 * (number % 3)
        measuring.first_token(0.02 + measuring.measured.overhead_s, 0.02 + rest)
    assert measuring.measured.overhead_s == pytest.approx(0.006, rel=0.3)
    for _ in range(600):
        measuring.first_token(0.02 + measuring.measured.overhead_s, 0.01)
    assert measuring.measured.overhead_s == 1e-4


def test_the_overhead_is_no_more_than_first_tokens_took_however_many_are_late_at_once() -> None:
    measuring = Measuring(None)
    for _ in range(500):  # all were sent out when 0.1 ms were known of
        measuring.first_token(0.02, 0.12)
    assert measuring.measured.overhead_s == pytest.approx(0.12)


def test_a_mix_needs_eight_prompts_and_answers_of_the_last_quarter_of_an_hour() -> None:
    measuring = Measuring(0.05)
    for number in range(8):
        assert measuring.mix(7.0) is None
        measuring.sent(Work(100, 5000.0), 150, float(number))
    assert measuring.mix(7.0) is None
    for number in range(8):
        measuring.answered(10 + number, float(number))
    mix = measuring.mix(7.0)
    assert mix is not None
    assert mix.answer_tokens == 13.5
    assert {prompt[1:] for prompt in mix.prompts} == {(Work(100, 5000.0), 150.0)}
    assert measuring.mix(900.0) is not None
    assert measuring.mix(900.5) is None, "the first ones are too old"


def test_of_many_prompts_and_answers_those_of_half_a_minute_are_in_the_mix() -> None:
    measuring = Measuring(0.05)
    for tokens, at in ((100, 0.0), (200, 31.0)):
        for _ in range(128):
            measuring.sent(Work(tokens, 0.0), tokens, at)
            measuring.answered(tokens, at)
    mix = measuring.mix(31.0)
    assert mix is not None
    assert {(p.num_tokens, mix.answer_tokens) for p in mix.prompts} == {(200.0, 200.0)}


def test_a_mix_has_prompts_by_size() -> None:
    measuring = Measuring(0.05)
    for number in range(20):
        measuring.sent(Work(100 * (number % 10), 0.0), 1000 + number % 10, 0.0)
        measuring.answered(10, 0.0)
    mix = measuring.mix(1.0)
    assert mix is not None
    assert sum(prompt.share for prompt in mix.prompts) == pytest.approx(1.0)
    tokens = [prompt.work.num_tokens for prompt in mix.prompts]
    assert tokens == sorted(tokens)
    assert sum(prompt.share * prompt.work.num_tokens for prompt in mix.prompts) == pytest.approx(450, abs=0.5), (
        "tokens of a class are rounded"
    )
    assert sum(prompt.share * prompt.num_tokens for prompt in mix.prompts) == pytest.approx(1004.5)


def test_the_longest_prompts_are_told_apart_most_finely() -> None:
    """64 prompts of 1 to 64 tokens: eight a class up to the 48th, then two."""
    measuring = Measuring(0.05)
    for tokens in range(1, 65):
        measuring.sent(Work(tokens, 0.0), tokens, 0.0)
        measuring.answered(tokens, 0.0)
    mix = measuring.mix(1.0)
    assert mix is not None
    assert [round(prompt.share * 64) for prompt in mix.prompts] == [8] * 6 + [2] * 8
    assert [prompt.num_tokens for prompt in mix.prompts[5:8]] == [44.5, 49.5, 51.5]
    assert mix.answers == (4.5, 12.5, 20.5, 28.5, 36.5, 44.5, 52.5, 60.5)
    assert mix.answer_tokens == 32.5
    assert mix.error == pytest.approx(18.473 / 32.5 / 8, rel=1e-4)
