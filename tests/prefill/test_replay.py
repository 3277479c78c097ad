"""Replay by hand, and against the production scheduler run step by step."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import SchedulerConfig
from baton.core.queueing import Waiting
from baton.core.step_cost import StepCost, StepShape, chunk_products
from baton.prefill.replay import ReplayRules, SeenPrompt, replay
from baton.prefill.scheduler import PrefillScheduler

COST = StepCost(1.0, 0.125, 0.0, 0.0, 0.0)


def test_prompts_share_steps_in_order_of_arrival() -> None:
    """0 to 2: eight tokens of the first. 2 to 3.75: its last two and the second."""
    prompts = [SeenPrompt(0.0, 10, 0), SeenPrompt(0.5, 4, 0)]
    assert replay(prompts, COST, ReplayRules(8, 8)) == [3.75, 3.25]


def test_a_step_may_be_planned_while_another_runs() -> None:
    """The second comes when both steps of the first are planned: 0 to 2, 2 to 3.25, and then 3.25 to 4.75."""
    prompts = [SeenPrompt(0.0, 10, 0), SeenPrompt(0.5, 4, 0)]
    assert replay(prompts, COST, ReplayRules(8, 8, overlaps=True)) == [3.25, 4.25]


def test_small_chunks_let_a_short_prompt_pass() -> None:
    """0 to 1.5: four of the long one. 1.5 to 3.5: four of each."""
    prompts = [SeenPrompt(0.0, 80, 0), SeenPrompt(1.0, 4, 0)]
    assert replay(prompts, COST, ReplayRules(8, 8))[1] == 20.5
    assert replay(prompts, COST, ReplayRules(8, 4))[1] == 2.5


def test_attention_to_what_is_cached_takes_time() -> None:
    cost = StepCost(1.0, 0.0, 0.01, 0.0, 0.0)
    assert replay([SeenPrompt(0.0, 10, 100)], cost, ReplayRules(5, 5)) == [pytest.approx(2 + 0.01 * 10 * 105)]


def test_what_is_not_begun_in_time_is_given_up() -> None:
    prompts = [SeenPrompt(0.0, 32, 0), SeenPrompt(0.5, 8, 0), SeenPrompt(7.5, 8, 0)]
    assert replay(prompts, COST, ReplayRules(8, 8, patience_s=5.0)) == [8.0, math.inf, 2.5]


def test_an_idle_worker_waits_for_the_next() -> None:
    assert replay([SeenPrompt(0.0, 8, 0), SeenPrompt(100.0, 8, 0)], COST, ReplayRules(8, 8)) == [2.0, 2.0]


def step_by_step(prompts: list[SeenPrompt], cost: StepCost, rules: ReplayRules) -> list[float]:
    """The production scheduler under a clock."""
    config = SchedulerConfig(rules.token_budget, rules.chunk_size, max_running=1000, max_waiting=1000)
    scheduler, ends, arrived = PrefillScheduler(config), [-math.inf, -math.inf], 0
    starts, ttfts = [p.num_cached for p in prompts], [math.inf] * len(prompts)
    while True:
        now = ends[-2] if rules.overlaps else ends[-1]
        if not scheduler.num_running:
            if arrived == len(prompts):
                return ttfts
            now = max(now, prompts[arrived].arrived_at)
        while arrived < len(prompts) and prompts[arrived].arrived_at <= now:
            scheduler.add(Waiting(str(arrived), prompts[arrived].arrived_at, prompts[arrived].num_tokens))
            scheduler.admit(str(arrived), prompts[arrived].num_tokens)
            arrived += 1
        plan = scheduler.plan()
        scheduler.launched(plan)
        products = sum(chunk_products(starts[int(c.request_id)], c.num_tokens) for c in plan)
        seconds = cost.seconds(StepShape(sum(c.num_tokens for c in plan), products))
        ends.append(max(now, ends[-1]) + seconds)
        for chunk in plan:
            index = int(chunk.request_id)
            starts[index] += chunk.num_tokens
            if chunk.is_last:
                ttfts[index] = ends[-1] - prompts[index].arrived_at


PROMPTS = st.lists(st.builds(SeenPrompt, st.integers(0, 60), st.integers(1, 60), st.integers(0, 40)), max_size=10)


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 24), st.sampled_from([1, 2, 4]), st.booleans())
def test_it_is_what_the_scheduler_does(prompts: list[SeenPrompt], budget: int, share: int, overlaps: bool) -> None:
    prompts = sorted(prompts)
    rules = ReplayRules(budget, max(budget // share, 1), overlaps)
    assert replay(prompts, COST, rules) == step_by_step(prompts, COST, rules)


@settings(deadline=None)
@given(PROMPTS, st.integers(4, 24), st.booleans())
def test_growing_steps_are_taken_in_one_go_where_the_budget_is_full(
    prompts: list[SeenPrompt], budget: int, overlaps: bool
) -> None:
    """Exactly where the budget fills every step, for nobody could join."""
    prompts = sorted(prompts)
    cost, rules = StepCost(1.0, 0.125, 2**-10, 0.0, 0.0), ReplayRules(budget, budget, overlaps)
    assert replay(prompts, cost, rules) == pytest.approx(step_by_step(prompts, cost, rules))
