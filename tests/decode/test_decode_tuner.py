"""DecodeTuner: caps by hand, what must hold for any input, and a small closed loop."""

import dataclasses
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.core.step_cost import StepCost, StepShape
from baton.decode.tuner import DecodeLoad, DecodeTuner, DecodeTunerConfig
from baton.worker.step_cost_learner import StepCostLearner
from baton.worker.tuning import Bounds, forced

# At 1000 tokens of context: 10 ms, and 2 ms for each sequence. A prompt token takes 0.1 ms.
COST = StepCost(10e-3, 1e-4, 0.0, 1e-3, 1e-6, num_samples=100, relative_error=0.05, num_prompt_samples=100)
POOL = 10**6


def make(target: float | None = 0.050, cap: int = 8, prompts: int = 64, low: int = 1, high: int = 256) -> DecodeTuner:
    bounds = Bounds(low, high), Bounds(16, 4096)
    return DecodeTuner(DecodeTunerConfig(cap, prompts, *bounds, tpot_target_s=target, margin=0.0))


def load(
    running: int, context: int = 1000, growth: float = 0.0, pool: int = POOL, prompts_per_s: float = 0.0
) -> DecodeLoad:
    return DecodeLoad(running, running * context, growth, pool, prompts_per_s)


def settled(tuner: DecodeTuner, cost: StepCost, one: DecodeLoad, seconds: int = 30, start: int = 0) -> DecodeTuner:
    for second in range(start, start + seconds):
        tuner.update(float(second), cost, one)
    return tuner


def test_the_cap_is_lowered_with_its_reason() -> None:
    tuner = make(cap=25)
    events = tuner.update(0.0, COST, load(25))
    assert [str(e) for e in events if e.what == "cap"] == ["cap 25 -> 20: predicted step 60 ms over the 50 ms target"]
    assert tuner.max_running == 20  # 10 + 20 * 2 = 50 ms


def test_the_cap_is_raised_step_by_step() -> None:
    tuner = make(cap=4)
    caps = []
    for second in range(4):
        tuner.update(float(second), COST, load(20))
        caps.append(tuner.max_running)
    assert caps == [8, 16, 20, 20]


def test_a_few_long_answers_do_not_keep_short_ones_out() -> None:
    """Three sequences of 10,000 tokens take 43 ms with the base; newcomers of 400 take 1.4 ms each."""
    few_long = DecodeLoad(3, 30_000, 0.0, POOL, newcomer=400.0)
    assert settled(make(target=0.051, cap=4), COST, few_long).max_running == 14
    assert settled(make(target=0.060, cap=8), COST, few_long).max_running == 27
    assert settled(make(target=0.030, cap=8), COST, few_long).max_running == 1  # one of the long ones, not two


def test_what_late_steps_have_left_of_the_target_is_lent_to_a_burst() -> None:
    """Steps of 30 ms leave 20 of the target: a burst may take 70 ms, which is 30 sequences, and not for long."""
    tuner = settled(make(cap=4), COST, load(10))
    assert tuner.max_running == 30
    assert settled(tuner, COST, load(30), seconds=200, start=30).max_running == 20


def test_growth_that_is_expected_counts() -> None:
    assert settled(make(), COST, load(20, growth=1000)).max_running == 13  # 3 ms each


def test_prompts_computed_here_take_their_share_of_the_time() -> None:
    """2000 tokens a second take 20 % of the time: 40 ms are left, 15 sequences."""
    assert settled(make(), COST, load(15, prompts_per_s=2000)).max_running == 15


def test_the_pool_bounds_the_cap() -> None:
    tuner = make(cap=30)
    events = tuner.update(0.0, COST, load(8, pool=16_900))
    assert events[0].reason == "the pool holds 16 sequences of 1000 tokens"
    assert tuner.max_running == 16


def test_a_target_that_one_alone_nearly_misses_is_not_chased_down_to_a_batch_of_one() -> None:
    """One alone takes 54.5 ms of the 60, and answers were late: 1.1 times that is aimed at, not 0.7 * 60 ms."""
    cost = StepCost(53.5e-3, 1e-4, 0.0, 1e-3, 0.0, num_samples=100, relative_error=0.05)
    busy = DecodeLoad(16, 1600, 0.0, POOL, aim=0.7)
    assert settled(make(target=0.060, cap=16), cost, busy).max_running == 6


def test_the_reason_names_what_the_step_is_compared_with() -> None:
    busy = DecodeLoad(40, 4000, 0.0, POOL, aim=0.8)
    events = make(target=0.050, cap=40).update(0.0, COST, busy)
    assert [str(e) for e in events if e.what == "cap"] == [
        "cap 40 -> 27: predicted step 54 ms over 40 ms, 80% of the 50 ms target"
    ]


def test_prompts_stay_as_they_are_until_it_is_known_what_they_cost() -> None:
    cost = StepCost(10e-3, 1e-6, 0.0, 1e-3, 0.0, num_samples=100, relative_error=0.05, num_prompt_samples=29)
    assert settled(make(prompts=64), cost, load(8)).prompt_budget == 64


def test_prompts_get_what_the_decodes_leave_of_the_target() -> None:
    assert settled(make(), COST, load(10)).prompt_budget == pytest.approx(200, rel=0.1)  # 20 ms
    assert settled(make(), COST, load(20)).prompt_budget == 16  # nothing is left: the lower bound


def test_one_chunk_may_be_longer_where_answers_make_up_for_it() -> None:
    # 30 of the 50 ms: an answer of 20 tokens may come 400 ms late, a quarter of it by one chunk
    spare = dataclasses.replace(load(10), answer=20.0)
    assert settled(make(), COST, spare).prompt_budget == pytest.approx(1000, rel=0.1)
    # prompts take a quarter of the time: 40 of the 50 ms, so half as much is left
    busy = dataclasses.replace(load(10, prompts_per_s=2500.0), answer=20.0)
    assert settled(make(), COST, busy).prompt_budget == pytest.approx(500, rel=0.1)
    # they take so much that nothing is: what one step may take
    full = dataclasses.replace(load(10, prompts_per_s=1e6), answer=20.0)
    assert settled(make(), COST, full).prompt_budget == pytest.approx(200, rel=0.1)


def test_the_reason_of_a_prompt_budget_says_what_was_measured_and_for_which_target() -> None:
    def reason_of(target: float | None) -> str:
        tuner = make(target=target)
        events = [event for n in range(200) for event in tuner.update(n * 0.1, COST, load(8))]
        return next(event.reason for event in events if event.what == "prompt budget")

    # Eight with 1000 tokens each: 10 + 8 * (1 + 1) ms
    assert reason_of(0.050) == (
        "a step takes 26 ms for its decodes and with the prompts of late 26 ms on average, which leaves 24 ms of the "
        "50 ms TPOT target to a step's prompts"
    )
    assert reason_of(None) == "without a TPOT target prompts may double a step, and decodes take 26 ms of it"


def test_sc04_a_stream_of_prompts_stalls_decodes_within_the_target() -> None:
    """sgl-project/sglang #32549: steady prompt load made running requests wait 24 s for a token."""
    tuner = settled(make(cap=256, prompts=4096), COST, load(12, prompts_per_s=1e6), seconds=60)
    assert COST.seconds(StepShape(tuner.prompt_budget, 0.0, 12, 12_000)) <= 0.050 * 1.1


def test_without_a_target_it_is_the_knee() -> None:
    tuner = settled(make(target=None), COST, load(8))
    assert tuner.max_running == pytest.approx(9 * 10 / 2, abs=4)
    assert tuner.prompt_budget == pytest.approx(260, rel=0.1)  # doubles a step of 26 ms


def test_the_defaults_hold_until_the_costs_are_known() -> None:
    young = StepCost(10e-3, 1e-4, 0.0, 1e-3, 1e-6, num_samples=5, relative_error=0.05)
    tuner = settled(make(cap=77), young, load(77))
    assert (tuner.max_running, tuner.prompt_budget) == (77, 64)
    assert settled(make(cap=77), COST, load(0)).max_running == 77  # nothing has run: no context is known


def test_forced_values_never_change() -> None:
    config = DecodeTunerConfig(99, 99, forced(7), forced(32), tpot_target_s=0.001)
    tuner = settled(DecodeTuner(config), COST, load(8))
    assert (tuner.max_running, tuner.prompt_budget) == (7, 32)


COSTS = st.builds(
    StepCost,
    st.floats(0, 0.1),
    st.floats(0, 1e-2),
    st.just(0.0),
    st.floats(0, 1e-2),
    st.floats(0, 1e-4),
    st.just(100),
    st.just(0.1),
)
LOADS = st.builds(
    DecodeLoad,
    st.integers(0, 300),
    st.integers(0, 10**6),
    st.floats(0, 10**4),
    st.integers(1, 10**7),
    st.floats(0, 1e6),
)


@settings(deadline=None)
@given(st.lists(st.tuples(COSTS, LOADS), max_size=20), st.none() | st.floats(1e-4, 1.0))
def test_bounds_hold_whatever_comes(inputs: list[tuple[StepCost, DecodeLoad]], target: float | None) -> None:
    tuner = make(target=target, low=2, high=100)
    for second, (cost, one) in enumerate(inputs):
        for event in tuner.update(float(second), cost, one):
            assert event.old != event.new
        assert 2 <= tuner.max_running <= 100
        assert 16 <= tuner.prompt_budget <= 4096


@settings(deadline=None)
@given(COSTS, LOADS, st.floats(1e-3, 1.0), st.floats(0.1, 1.0), st.integers(1, 256))
def test_a_lower_target_never_gives_a_higher_cap(
    cost: StepCost, one: DecodeLoad, target: float, share: float, cap: int
) -> None:
    context = one.context / one.num_running + one.growth if one.num_running else 0.0
    alone = cost.base_s + cost.per_decode_s + cost.per_context_s * context
    assume(target * share > 1.001 * alone)  # what cannot be held is given up for throughput
    high, low = make(target, cap), make(target * share, cap)
    for second in range(12):
        high.update(float(second), cost, one)
        low.update(float(second), cost, one)
        assert low.max_running <= high.max_running


@settings(deadline=None)
@given(COSTS, LOADS, st.none() | st.floats(1e-3, 1.0))
def test_constant_input_settles(cost: StepCost, one: DecodeLoad, target: float | None) -> None:
    tuner = make(target)
    settled(tuner, cost, one, seconds=60)
    assert [tuner.update(60.0 + second, cost, one) for second in range(60)] == [[]] * 60


def test_in_a_closed_loop_steps_stay_under_the_target_and_nearly_use_it() -> None:
    """Endless demand. The learner and the tuner know nothing at first; the device is noisy and slows down half-way."""
    rng, learner = random.Random(1), StepCostLearner()
    tuner = DecodeTuner(DecodeTunerConfig(8, 64, Bounds(1, 256), Bounds(16, 4096), tpot_target_s=0.040))
    contexts: list[int] = []
    now, steps, num_changes = 0.0, [], []
    while now < 120.0:
        speed = 1.0 if now < 60.0 else 1.5
        while len(contexts) < tuner.max_running:
            contexts.append(rng.randint(200, 3000))
        shape = StepShape(0, 0.0, len(contexts), sum(contexts))
        seconds = COST.seconds(shape) * 0.5 * speed * max(rng.gauss(1, 0.05), 0.5)
        learner.observe(shape, seconds)
        now += seconds
        steps.append((now, seconds))
        contexts = [context + 1 for context in contexts if rng.random() > 1 / 200]
        events = tuner.update(now, learner.cost, DecodeLoad(len(contexts), sum(contexts), 0.0, POOL))
        num_changes += [now for event in events if event.what == "cap"]
    for start, stop in ((20.0, 60.0), (90.0, 120.0)):
        of_phase = [seconds for at, seconds in steps if start < at <= stop]
        assert 0.032 < sum(of_phase) / len(of_phase) < 0.040
    # the mean context itself moves by a tenth every few seconds
    assert len([at for at in num_changes if 20.0 < at < 60.0 or at > 90.0]) <= 70 / 5
