"""The aim: which share of the TPOT target steps are planned for."""

import random

import pytest

from baton.decode.aim import FIRST_AIM, LEAST_AIM, Aim


def test_by_hand() -> None:
    aim = Aim(0.05)
    aim.ended(0.051, 20, 20)
    assert aim.share == pytest.approx(FIRST_AIM - 0.9 * 0.2 / 20)
    aim.ended(0.049, 20, 20)
    assert aim.share == pytest.approx(FIRST_AIM - 0.8 * 0.2 / 20)
    aim.ended(None, 20, 20)
    assert aim.share == pytest.approx(FIRST_AIM - 0.8 * 0.2 / 20)


def test_in_time_on_a_full_worker_all_of_it_is_aimed_at() -> None:
    aim = Aim(0.05)
    for _ in range(1000):
        aim.ended(0.04, 8, 8)
    assert aim.share == 1.0


def test_in_time_on_a_worker_with_places_left_says_nothing() -> None:
    aim = Aim(0.05)
    for _ in range(1000):
        aim.ended(0.04, 7, 10)
    assert aim.share == FIRST_AIM


def test_without_a_target_there_is_nothing_to_aim_at() -> None:
    aim = Aim(None)
    aim.ended(1.0, 8, 8)
    assert aim.share == 1.0


def test_a_target_that_cannot_be_held_is_not_run_away_from() -> None:
    aim = Aim(0.05)
    for _ in range(1000):
        aim.ended(1.0, 1, 8)
    assert aim.share == LEAST_AIM


def test_as_many_as_run_together_change_little() -> None:
    aim = Aim(0.05)
    for _ in range(200):
        aim.ended(0.06, 200, 200)
    assert aim.share == pytest.approx(FIRST_AIM - 0.18)


def test_nine_in_ten_are_in_time_where_tpot_follows_the_aim_and_has_a_spread() -> None:
    aim, generator, num_late = Aim(0.05), random.Random(1), 0
    for number in range(20_000):
        tpot_s = 0.05 * aim.share * generator.gauss(1.05, 0.08)
        aim.ended(tpot_s, 16, 16)
        num_late += tpot_s > 0.05 and number >= 2000
    assert num_late / 18_000 == pytest.approx(0.1, abs=0.01)
    assert aim.share == pytest.approx(1 / (1.05 + 1.28 * 0.08), abs=0.04)
