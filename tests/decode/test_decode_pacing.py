"""DecodePacing: what the tuner wants reaches the scheduler, and what the user fixed stays."""

import pytest

from baton.core.config import SchedulerConfig
from baton.core.step_cost import StepCost, StepShape
from baton.decode.pacing import DecodePacing
from baton.decode.scheduler import DecodeScheduler

COST = StepCost(0.030, 0.001, 0.0, 0.002, 0.0, num_samples=1000, relative_error=0.05, num_prompt_samples=1000)


def after_a_minute(config: SchedulerConfig, num_decodes: int = 20) -> DecodeScheduler:
    scheduler = DecodeScheduler(config)
    pacing = DecodePacing(config, scheduler, pool_tokens=100_000)
    for second in range(60):
        pacing.launched(StepShape(num_decodes=num_decodes, decode_context=100 * num_decodes), float(second))
        pacing.ended(80, 40, 0.02)
        pacing.update(float(second), COST)
    return scheduler


def test_without_a_range_nothing_moves() -> None:
    scheduler = after_a_minute(SchedulerConfig(256, 256, 64))
    assert (scheduler.max_running, scheduler.prompt_budget) == (64, None)


def test_the_cap_follows_the_target() -> None:
    config = SchedulerConfig(256, 256, 64, 1024, (16, 512), (1, 64), None, 0.050)
    assert 7 <= after_a_minute(config).max_running <= 9  # 30 + 2 B ms within 47.5 ms is 8.75


def test_a_target_that_nothing_can_hold_is_given_up_for_throughput() -> None:
    config = SchedulerConfig(256, 256, 64, 1024, (16, 512), (1, 200), None, 0.020)
    assert 120 <= after_a_minute(config).max_running <= 150  # 9 * 30 / 2


def test_what_is_fixed_stays_and_prompts_get_their_budget_beside_the_decodes() -> None:
    fixed = after_a_minute(SchedulerConfig(256, 256, 64, 1024, (256, 256), (64, 64), None, 0.050))
    assert (fixed.max_running, fixed.prompt_budget) == (64, None)
    config = SchedulerConfig(256, 256, 64, 1024, (16, 512), (64, 64), None, 0.100)
    # 20 decodes take 70 ms of the 95, which makes 25 * 40 ms over an answer, a quarter of it for one chunk
    assert after_a_minute(config).prompt_budget == pytest.approx(250, rel=0.1)


def test_settings_have_the_names_of_the_events() -> None:
    config = SchedulerConfig(256, 256, 64, 1024, (16, 512), (1, 64), None, 0.050)
    scheduler = DecodeScheduler(config)
    pacing = DecodePacing(config, scheduler, pool_tokens=100_000)
    assert pacing.settings == {"cap": 64, "token budget": 256}
    moved = set()
    for second in range(60):
        pacing.launched(StepShape(num_decodes=20, decode_context=2000), float(second))
        moved |= {event.what for event in pacing.update(float(second), COST)}
    assert moved == {"cap", "prompt budget"} == set(pacing.settings)
    assert pacing.settings["prompt budget"] == scheduler.prompt_budget
