"""What a step took: from its launch, or from the end of the step in front of it."""

import pytest

from baton.core.step_cost import StepShape
from baton.worker.step_watch import StepWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(overlaps: bool, seconds_of: dict[int, float], num_rounds: int) -> StepWatch:
    """Steps of different sizes, one after the other or each launched while the one before runs."""
    clock = Clock()
    watch = StepWatch(clock)
    sizes = list(seconds_of) * num_rounds
    free_at, waiting = clock.now, None
    for number, size in enumerate(sizes):
        watch.launched(number, StepShape(num_prompt_tokens=size))
        if overlaps and waiting is not None:
            clock.now = free_at
            watch.collected(waiting)
        free_at = max(free_at, clock.now) + seconds_of[size]
        waiting = number
        if not overlaps:
            clock.now = free_at
            watch.collected(number)
            clock.now += 0.5
            free_at = clock.now
    return watch


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_cost_is_that_of_the_device_not_of_waiting(overlaps: bool) -> None:
    seconds_of = {100: 0.3, 200: 0.5, 400: 0.9}  # 0.1 s and 2 ms a token
    cost = run(overlaps, seconds_of, 60).cost
    for size, seconds in seconds_of.items():
        assert cost.seconds(StepShape(num_prompt_tokens=size)) == pytest.approx(seconds, rel=0.05)


def test_steps_of_two_roles_that_are_collected_out_of_order_teach_nothing_wrong() -> None:
    clock, seconds_of = Clock(), {100: 0.3, 200: 0.5, 400: 0.9}
    watch = StepWatch(clock)
    for number, size in enumerate(list(seconds_of) * 60):
        if number % 12 == 0:  # two are launched, and the second one's role looks first
            watch.launched(2 * number, StepShape(num_decodes=1))
            watch.launched(2 * number + 1, StepShape(num_prompt_tokens=size))
            clock.now += 7.0
            watch.collected(2 * number + 1)
            watch.collected(2 * number)
        else:
            watch.launched(2 * number, StepShape(num_prompt_tokens=size))
            clock.now += seconds_of[size]
            watch.collected(2 * number)
    assert watch.cost.num_samples == run(False, seconds_of, 55).cost.num_samples
    for size, seconds in seconds_of.items():
        assert watch.cost.seconds(StepShape(num_prompt_tokens=size)) == pytest.approx(seconds, rel=0.05)


def test_nothing_is_told_before_there_were_steps() -> None:
    assert StepWatch(Clock()).learned is None


def test_a_step_that_was_not_launched_is_a_bug() -> None:
    with pytest.raises(KeyError):
        StepWatch(Clock()).collected(1)


def test_all_steps_are_added_up_from_the_first_one_on() -> None:
    watch = run(True, {100: 0.3, 200: 0.5, 400: 0.9}, 10)  # the last of the 30 is never collected
    totals = watch.totals
    assert (totals.num_steps, totals.num_prompt_tokens) == (29, 10 * 700 - 400)
    assert totals.seconds == pytest.approx(10 * 1.7 - 0.9)
