"""Which steps are tried before a worker joins: they fit, they differ, and there are no more of them than needed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import StepCost, StepShape
from baton.worker.step_watch import StepWatch
from baton.worker.trials import (
    GOAL_S,
    MOST_S,
    Trial,
    TrialLimits,
    is_over,
    is_worth_its_time,
    trials,
    warmups,
)

PROCESSOR = StepCost(30e-3, 0.8e-3, 1e-7, 4e-3, 5e-6)
CARD = StepCost(4.88e-3, 1.8e-5, 8.5e-10, 1.39e-5, 2.98e-8)
DEVICES = {
    "processor": (PROCESSOR, TrialLimits(512, 64, 8192, 2912, 16)),
    "card": (CARD, TrialLimits(2048, 256, 32768, 60_000, 16)),
    "pool of 4 blocks": (PROCESSOR, TrialLimits(256, 64, 64, 4, 16)),
}


@st.composite
def any_limits(draw: st.DrawFn) -> TrialLimits:
    num_blocks, block_size = draw(st.integers(1, 400)), draw(st.sampled_from([1, 16, 128]))
    context = draw(st.integers(1, num_blocks * block_size))
    return TrialLimits(draw(st.integers(1, 8192)), draw(st.integers(0, 256)), context, num_blocks, block_size)


@given(any_limits())
def test_no_trial_is_larger_than_what_the_worker_may_run(limits: TrialLimits) -> None:
    for trial in [*warmups(limits), *trials(limits)]:
        shape = trial.shape
        assert 1 <= shape.num_prompt_tokens + shape.num_decodes <= limits.token_budget
        assert shape.num_decodes <= limits.max_batch
        assert trial.num_blocks(limits.block_size) <= limits.num_scratch_blocks <= limits.num_blocks
        assert all(start >= 0 and n >= 1 and start + n <= limits.context_length for start, n in trial.prompts)
        assert all(1 <= context <= limits.context_length for context in trial.decodes)


def test_a_trial_by_hand() -> None:
    trial = Trial(prompts=((32, 16),), decodes=(17, 17))
    assert trial.shape == StepShape(16, 16 * (32 + 8), 2, 34)
    assert trial.num_blocks(16) == 3 + 2 + 2


def test_the_first_trials_are_of_every_kind_and_not_long() -> None:
    first = list(itertools.islice(trials(DEVICES["processor"][1]), 3))
    assert [(t.shape.num_prompt_tokens, t.shape.num_decodes) for t in first] == [(19, 0), (0, 28), (31, 10)]


def test_a_worker_that_is_not_made_for_decodes_tries_prompts_only() -> None:
    found = list(trials(TrialLimits(8192, 0, 32768, 60_000, 16)))
    assert len(found) > 12
    assert not any(trial.decodes for trial in found)


@pytest.mark.parametrize("device", DEVICES)
def test_the_cost_is_known_when_the_trials_are_over(device: str) -> None:
    truth, limits = DEVICES[device]
    watch, elapsed = StepWatch(lambda: 0.0), 0.0
    for trial in trials(limits):
        if is_over(elapsed, watch.cost, limits):
            break
        if is_worth_its_time(trial, watch.cost):
            seconds = truth.seconds(trial.shape)
            watch.tried(trial.shape, seconds)
            elapsed += seconds
    cost = watch.cost
    assert cost.knows_prompts
    assert cost.knows_decodes
    assert elapsed < GOAL_S + 0.25
    errors = [abs(cost.seconds(trial.shape) / truth.seconds(trial.shape) - 1) for trial in trials(limits)]
    assert max(errors) < 0.2
    assert watch.totals.num_steps == 0


def test_it_ends_when_enough_is_known_or_when_it_has_lasted_too_long() -> None:
    limits = DEVICES["processor"][1]
    known = StepCost(0.03, 1e-3, 0.0, 1e-3, 0.0, 60, 0.1, 30, 30)
    prompts_only = StepCost(0.03, 1e-3, 0.0, 1e-3, 0.0, 60, 0.1, 60, 0)
    assert [is_over(t, known, limits) for t in (GOAL_S - 0.1, GOAL_S + 0.1)] == [False, True]
    assert [is_over(t, prompts_only, limits) for t in (GOAL_S + 0.1, MOST_S + 0.1)] == [False, True]
    assert is_over(GOAL_S + 0.1, prompts_only, TrialLimits(512, 0, 8192, 2912, 16))


def test_a_step_that_would_take_much_of_the_time_is_left_out() -> None:
    cost = StepCost(0.03, 1e-3, 0.0, 1e-3, 0.0)
    assert is_worth_its_time(Trial(prompts=((0, 100),)), cost)  # 130 ms
    assert not is_worth_its_time(Trial(prompts=((0, 150),)), cost)  # 180 ms
    slow = StepCost(0.3, 1e-3, 0.0, 1e-3, 0.0)  # where each step takes long, some must be run all the same
    assert is_worth_its_time(Trial(prompts=((0, 150),)), slow)
