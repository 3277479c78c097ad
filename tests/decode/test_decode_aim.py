"""The aim: which share of the TPOT target steps are planned for."""

import random

import pytest

from baton.decode.aim import LEAST_AIM, MOST_AIM, Aim


def test_by_hand() -> None:
    aim = Aim(0.05)
    aim.ended(0.051, 20, 20)
    assert aim.share == pytest.approx(1 + 0.2 / 20 * (0.07 - 1 / 64))
    before = aim.share
    aim.ended(0.049, 15, 20)  # there are places left
    aim.ended(None, 20, 20)
    assert aim.share == before
    aim.ended(0.049, 16, 20)
    assert aim.share == pytest.approx(before + 0.2 / 16 * (0.07 - 1 / 64 * (63 / 64) ** 2))


def test_in_time_on_a_full_worker_more_is_aimed_at() -> None:
    aim = Aim(0.05)
    for _ in range(1000):
        aim.ended(0.04, 8, 8)
    assert aim.share == MOST_AIM


def test_a_worker_that_is_seldom_full_may_be_late_then() -> None:
    aim = Aim(0.05)
    for number in range(2000):
        is_full = number % 20 == 0
        aim.ended(0.06 if is_full else 0.04, 10 if is_full else 5, 10)
    assert aim.share > 1.0


def test_without_a_target_there_is_nothing_to_aim_at() -> None:
    aim = Aim(None)
    aim.ended(1.0, 8, 8)
    assert aim.share == 1.0


def test_a_target_that_cannot_be_held_is_not_run_away_from() -> None:
    aim = Aim(0.05)
    for _ in range(1000):
        aim.ended(1.0, 8, 8)
    assert aim.share == LEAST_AIM


def test_as_many_as_run_together_change_little() -> None:
    aim = Aim(0.05)
    for _ in range(200):
        aim.ended(0.06, 200, 200)
    assert aim.share == pytest.approx(0.88, abs=0.03)


def test_few_are_late_where_tpot_follows_the_aim_and_has_a_spread() -> None:
    aim, generator, num_late = Aim(0.05), random.Random(1), 0
    for number in range(20_000):
        tpot_s = 0.05 * aim.share * generator.gauss(1.05, 0.08)
        aim.ended(tpot_s, 16, 16)
        num_late += tpot_s > 0.05 and number >= 2000
    assert num_late / 18_000 == pytest.approx(0.07, abs=0.01)
    assert aim.share == pytest.approx(1 / (1.05 + 1.48 * 0.08), abs=0.04)
