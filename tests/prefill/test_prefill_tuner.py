"""PrefillTuner: the knee by hand, what must hold for any input, and closed loops over the production scheduler."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import SchedulerConfig
from baton.core.queueing import Waiting
from baton.core.step_cost import StepCost, StepShape, chunk_products
from baton.core.tuner_event import TunerEvent
from baton.prefill.scheduler import PrefillScheduler
from baton.prefill.tuner import PrefillTuner, PrefillTunerConfig, knee_budget
from baton.worker.step_cost_learner import StepCostLearner
from baton.worker.tuning import Bounds, forced

COST = StepCost(10e-3, 1e-4, 0.0, 0.0, 0.0, num_samples=100, relative_error=0.05)


def make(target: float | None, budget: int = 1024, low: int = 64, high: int = 8192) -> PrefillTuner:
    return PrefillTuner(PrefillTunerConfig(budget, budget, Bounds(low, high), Bounds(low, high), target))


def settled(tuner: PrefillTuner, cost: StepCost, seconds: int = 60) -> list[TunerEvent]:
    return [event for second in range(seconds) for event in tuner.update(100.0 + second, cost, 0)]


# ---- the knee ------------------------------------------------------------------------------------------------------


def test_the_knee_reaches_nine_tenths_of_the_greatest_throughput() -> None:
    assert knee_budget(COST, attended=0.0) == pytest.approx(900)
    throughput = 900 / (10e-3 + 900 * 1e-4)
    assert throughput == pytest.approx(0.9 / 1e-4)
    assert knee_budget(StepCost(10e-3, 1e-4, 1e-7, 0.0, 0.0), attended=1000.0) == pytest.approx(450)


def test_without_a_target_it_moves_to_the_knee() -> None:
    tuner = make(None, budget=4096)
    for index in range(10):
        tuner.saw(90.0 + index, 500, 0)
    events = settled(tuner, COST)
    assert tuner.token_budget == tuner.chunk_size == pytest.approx(900, rel=0.1)
    assert str(events[0]) == "token budget 4096 -> 2048: 90% of the greatest throughput needs 900 tokens a step"


# ---- targets -------------------------------------------------------------------------------------------------------


def test_small_budgets_let_short_prompts_be_in_time() -> None:
    """Short prompts of 100 come while a long one of 16,000 is computed: in steps of 8192 most wait for 800 ms."""
    tuner = make(0.100, budget=8192)
    for cycle in range(4):
        tuner.saw(60.0 + 10 * cycle, 16_000, 0)
        for index in range(10):
            tuner.saw(60.05 + 10 * cycle + 0.15 * index, 100, 0)
    events = settled(tuner, COST)
    assert tuner.chunk_size < 1024
    assert "of the last 44 prompts would be over the 100 ms left for them" in events[0].reason


def test_a_small_base_and_a_crowd_of_equal_prompts_want_no_batching() -> None:
    """32 prompts at once: each takes 61 ms alone; of 13 in a step all wait for the last one."""
    cost = StepCost(1e-3, 1e-4, 0.0, 0.0, 0.0, num_samples=100, relative_error=0.05)
    tuner = make(2.0, budget=8192)
    for burst in range(2):
        for _ in range(32):
            tuner.saw(60.0 + 20 * burst, 600, 0)
    settled(tuner, cost)
    assert tuner.token_budget <= 2048


def test_a_large_base_and_a_crowd_want_large_steps() -> None:
    cost = StepCost(100e-3, 1e-4, 0.0, 0.0, 0.0, num_samples=100, relative_error=0.05)
    tuner = make(1.0, budget=128)
    for index in range(60):
        tuner.saw(60.0 + 0.2 * index, 600, 0)
    settled(tuner, cost)
    assert tuner.token_budget >= 1024


def test_what_the_handover_takes_is_not_left_for_prompts() -> None:
    """In 5 steps of 100 tokens a prompt takes 100 ms, in 3 larger ones 80 ms: with 30 ms of hand-over 100 is late."""
    for handover in (0.0, 0.030):
        tuner = PrefillTuner(PrefillTunerConfig(100, 100, Bounds(100, 200), Bounds(100, 200), 0.125))
        for index in range(20):
            tuner.saw(80.0 + index, 500, 0)
        reasons = [e.reason for s in range(10) for e in tuner.update(100.0 + s, COST, 0, handover)]
        assert any("left for them" in reason for reason in reasons) is (handover > 0)


def test_the_defaults_hold_until_costs_and_traffic_are_known() -> None:
    tuner = make(0.001, budget=777)
    assert settled(tuner, COST) == []  # no prompts
    for index in range(50):
        tuner.saw(90.0 + index / 10, 5000, 0)
    young = StepCost(10e-3, 1e-4, 0.0, 0.0, 0.0, num_samples=5, relative_error=0.05)
    assert settled(tuner, young) == []
    assert (tuner.token_budget, tuner.chunk_size) == (777, 777)


@pytest.mark.parametrize("target", [None, 0.05])
def test_forced_values_never_change(target: float | None) -> None:
    tuner = PrefillTuner(PrefillTunerConfig(64, 64, forced(300), forced(200), target))
    for index in range(50):
        tuner.saw(90.0 + index / 10, 5000, 0)
    assert settled(tuner, COST) == []
    assert (tuner.token_budget, tuner.chunk_size) == (300, 200)


# ---- whatever comes ------------------------------------------------------------------------------------------------

COSTS = st.builds(
    StepCost,
    st.floats(0, 0.5),
    st.floats(0, 1e-2),
    st.floats(0, 1e-6),
    st.just(0.0),
    st.just(0.0),
    st.just(100),
    st.just(0.1),
)
PROMPTS = st.lists(
    st.tuples(st.floats(60, 100), st.integers(0, 20_000), st.integers(0, 20_000)), min_size=8, max_size=30
)


@settings(deadline=None)
@given(COSTS, PROMPTS, st.none() | st.floats(1e-3, 10.0), st.floats(0, 1))
def test_bounds_hold_and_constant_input_settles(
    cost: StepCost, prompts: list[tuple[float, int, int]], target: float | None, handover: float
) -> None:
    tuner = make(target, low=100, high=3000)
    for prompt in prompts:
        tuner.saw(*prompt)
    moves: dict[float, int] = {}
    for second in range(80):
        for event in tuner.update(100.0 + second, cost, 0, handover):
            assert event.old != event.new
            moves[event.at] = moves.get(event.at, 0) + 1
        assert 100 <= tuner.token_budget <= 3000
        assert 100 <= tuner.chunk_size <= 3000
    times = sorted(moves)
    assert all(later - earlier >= 3.0 for earlier, later in pairwise(times))
    assert all(at < 160.0 for at in times)


# ---- closed loops --------------------------------------------------------------------------------------------------


def goodput(
    arrivals: list[tuple[float, int]], truth: StepCost, target: float, tuner: PrefillTuner | None, budget: int
) -> tuple[int, list[TunerEvent]]:
    """How many prompts are computed within the target, but for the first seconds, in which costs are learned.

    What cannot be in time is dropped, as admission does.
    """
    scheduler = PrefillScheduler(SchedulerConfig(budget, budget, max_running=10**6))
    learner, rng, events = StepCostLearner(), random.Random(3), []
    begun: dict[str, int] = {}
    now, arrived, in_time = 0.0, 0, 0
    while arrived < len(arrivals) or begun:
        while arrived < len(arrivals) and arrivals[arrived][0] <= now:
            at, num_tokens = arrivals[arrived]
            scheduler.add(Waiting(str(arrived), at, num_tokens))
            scheduler.admit(str(arrived), num_tokens)
            begun[str(arrived)] = 0
            if tuner:
                tuner.saw(at, num_tokens, 0)
            arrived += 1
        for request_id in [r for r, done in begun.items() if not done and now - arrivals[int(r)][0] > target]:
            scheduler.remove(request_id)
            del begun[request_id]
        if tuner:
            events += tuner.update(now, learner.cost, scheduler.num_waiting_tokens)
            scheduler.token_budget, scheduler.chunk_size = tuner.token_budget, tuner.chunk_size
        plan = scheduler.plan()
        if not plan:
            now = arrivals[arrived][0] if arrived < len(arrivals) else now
            continue
        products = sum(chunk_products(begun[c.request_id], c.num_tokens) for c in plan)
        shape = StepShape(sum(c.num_tokens for c in plan), products)
        seconds = truth.seconds(shape) * max(rng.gauss(1, 0.05), 0.5)
        learner.observe(shape, seconds)
        now += seconds
        scheduler.launched(plan)
        for chunk in plan:
            begun[chunk.request_id] += chunk.num_tokens
            if chunk.is_last:
                del begun[chunk.request_id]
                at = arrivals[int(chunk.request_id)][0]
                in_time += at >= 20.0 and now - at <= target
    return in_time, events


def traffic(rates: list[float], seconds: float, seed: int) -> list[tuple[float, int]]:
    """Poisson arrivals at one rate after the other, mostly short prompts and some long ones."""
    rng, arrivals, now = random.Random(seed), [], 0.0
    for number, rate in enumerate(rates):
        while now < (number + 1) * seconds:
            now += rng.expovariate(rate)
            arrivals.append((now, rng.choice([200, 400, 800, 1600, 6000])))
    return arrivals


@pytest.mark.parametrize("start", [128, 8192])
@pytest.mark.parametrize(
    "truth",
    [StepCost(6e-3, 2e-5, 8.5e-10, 0.0, 0.0), StepCost(60e-3, 4e-5, 1e-9, 0.0, 0.0)],
    ids=["small base", "large base"],
)
def test_from_a_bad_start_it_is_nearly_as_good_as_the_best_fixed_budget(truth: StepCost, start: int) -> None:
    """The rate steps from a quarter to more than half of what could be computed at all."""
    target = 4 * truth.seconds(StepShape(800, 320_000.0))
    capacity = 0.5 / truth.seconds(StepShape(1800, 2_000_000.0))
    arrivals = traffic([0.5 * capacity, 1.2 * capacity], 60.0, seed=4)
    best = max(goodput(arrivals, truth, target, None, b)[0] for b in (128, 256, 512, 1024, 2048, 4096, 8192))
    tuned, events = goodput(arrivals, truth, target, make(target, budget=start), start)
    assert tuned >= 0.95 * best
    assert len(events) <= 30
