"""Settings: bounds, hysteresis, ramp, one change per interval; which costs are trusted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import StepCost
from baton.core.tuner_event import TunerEvent
from baton.worker.tuning import Bounds, Setting, forced, in_ms


def test_it_moves_when_the_gain_is_large_enough_and_says_why() -> None:
    setting = Setting("cap", 12, Bounds(1, 64), interval_s=1.0)
    assert setting.towards(13, "no gain", 0.0) is None
    event = setting.towards(9.9, "predicted step 61 ms over the 50 ms target", 0.0)
    assert event == TunerEvent(0.0, "cap", 12, 9, "predicted step 61 ms over the 50 ms target")
    assert str(event) == "cap 12 -> 9: predicted step 61 ms over the 50 ms target"
    assert setting.value == 9


def test_a_missed_target_needs_no_gain() -> None:
    setting = Setting("cap", 100, Bounds(1, 256), interval_s=1.0)
    assert setting.towards(99, "", 0.0) is None
    assert setting.towards(101, "", 0.0, is_late=True) is None
    assert setting.towards(99, "", 0.0, is_late=True) is not None
    assert setting.value == 99


def test_it_changes_once_in_an_interval_and_by_a_factor_at_most() -> None:
    setting = Setting("cap", 10, Bounds(1, 64), interval_s=2.0)
    assert setting.towards(60, "", 5.0) is not None
    assert setting.value == 20
    assert setting.towards(60, "", 6.9) is None
    assert setting.towards(60, "", 7.0) is not None
    assert setting.towards(1, "", 9.0) is not None
    assert setting.value == 20


def test_bounds_hold_and_a_bound_of_one_value_forces_it() -> None:
    assert Setting("cap", 100, Bounds(1, 64), 1.0).value == 64
    setting = Setting("cap", 100, forced(32), 1.0)
    assert (setting.value, setting.towards(64, "", 0.0), setting.set(1, "", 0.0)) == (32, None, None)
    with pytest.raises(ValueError, match="1 <= low <= high"):
        Bounds(0, 4)


@given(st.integers(1, 1000), st.floats(-10, 2000), st.floats(0, 500))
def test_who_wants_less_never_gets_more(value: int, wanted: float, less: float) -> None:
    one, other = (Setting("cap", value, Bounds(1, 512), 1.0) for _ in range(2))
    one.towards(wanted, "", 0.0)
    other.towards(wanted - less, "", 0.0)
    assert other.value <= one.value


@given(st.integers(1, 1000), st.floats(-10, 2000))
def test_a_constant_wish_is_followed_without_oscillation(value: int, wanted: float) -> None:
    setting = Setting("cap", value, Bounds(1, 512), 1.0)
    values = [setting.value]
    for second in range(20):
        setting.towards(wanted, "", float(second))
        values.append(setting.value)
    assert values in (sorted(values), sorted(values, reverse=True))
    assert 0.89 < setting.value / max(setting.bounds.clip(wanted), 1) < 1.12


def test_costs_are_trusted_when_many_steps_taught_them() -> None:
    assert StepCost(1, 1, 1, 1, 1, num_samples=30, relative_error=0.3).is_trusted
    assert not StepCost(1, 1, 1, 1, 1, num_samples=29, relative_error=0.3).is_trusted
    assert not StepCost(1, 1, 1, 1, 1, num_samples=30, relative_error=0.6).is_trusted


def test_milliseconds_for_people() -> None:
    assert (in_ms(0.0611), in_ms(0.0042)) == ("61 ms", "4.2 ms")
