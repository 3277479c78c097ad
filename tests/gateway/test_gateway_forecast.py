"""Predicted seconds, by hand: a step costs 10 ms, a prompt token 0.1 ms, a decode 1 ms, a token of context 0.01 ms."""

from typing import Any

import msgspec
import pytest

from baton.core.messages import NodeRef, Role, Status
from baton.core.step_cost import StepCost
from baton.gateway.forecast import Pace, Speed, Work, pool_waits, rest_of_prompt, speeds
from baton.gateway.membership import Worker

COST = StepCost(0.01, 1e-4, 0.0, 1e-3, 1e-5, 100, 0.1, num_prompt_samples=50, num_decode_samples=50)
SPEED = Speed(COST, token_budget=1000, chunk_size=400, prompt_budget=200)
STATUS = Status(*[0] * 15)
SETTINGS = {"token budget": 1000, "chunk size": 400, "cap": 64, "prompt budget": 200}


def test_seconds_of_a_backlog_and_of_what_comes_behind_it() -> None:
    pace = Pace(0.01, 1e-4, 1e-8, budget=100, chunk_size=100, join_s=0.0)
    assert pace.seconds(Work()) == 0.0
    assert pace.seconds(Work(100)) == pytest.approx(0.01 + 0.01)
    assert pace.seconds(Work(250, 1e6)) == pytest.approx(3 * 0.01 + 0.025 + 0.01)
    assert pace.compute_s(Work(), Work(250)) == pytest.approx(3 * 0.01 + 0.025)
    assert pace.compute_s(Work(250), Work(50)) == pytest.approx(0.005), "it fits into the last step of the backlog"
    assert pace.compute_s(Work(250), Work(51)) == pytest.approx(0.01 + 0.0051)


def test_a_prompt_alone_is_bound_by_the_chunk_size() -> None:
    pace = Pace(0.01, 0.0, 0.0, budget=1000, chunk_size=400, join_s=0.0)
    assert pace.compute_s(Work(), Work(1000)) == pytest.approx(0.03)
    assert pace.compute_s(Work(2000), Work(1000)) == pytest.approx(0.01), "others share the steps"


def test_products_of_the_rest_of_a_prompt() -> None:
    assert rest_of_prompt(10, 4) == Work(4, 4 * (6 + 2))
    assert rest_of_prompt(10, 10) == Work(10, 50)


def test_steps_of_a_decode_worker_carry_its_decodes() -> None:
    idle = SPEED.as_decode(0, 0)
    assert (idle.step_s, idle.join_s, idle.budget) == (0.01, 0.0, 200)
    busy = SPEED.as_decode(8, 1000)
    assert busy.step_s == pytest.approx(0.01 + 8e-3 + 1000e-5)
    assert busy.join_s == pytest.approx(0.014)
    holding = msgspec.structs.replace(SPEED, held_tokens=2000).as_decode(8, 1000)
    assert holding.step_s == pytest.approx(0.01 + 8e-3 + 2000e-5), "it holds more than was sent there: outputs"


def test_a_prefill_worker_that_also_decodes_keeps_its_steps_short_and_alternates() -> None:
    alone = SPEED.as_prefill(0, 0)
    assert (alone.step_s, alone.budget, alone.chunk_size, alone.join_s) == (0.01, 1000, 400, 0.0)
    both = SPEED.as_prefill(8, 1000)
    assert (both.budget, both.chunk_size) == (200, 200)
    assert both.step_s == pytest.approx(0.01 + 0.028)


# ---- what is known of whom -------------------------------------------------------------------------------------------


def worker(world_module: Any, name: str, cost: StepCost | None, **changes: Any) -> Worker:
    info = world_module.worker_info(name, Role.DECODE, **{k: changes.pop(k) for k in ("device",) if k in changes})
    status = msgspec.structs.replace(
        STATUS, step_cost=cost, **{"settings": SETTINGS, "available_blocks": 256} | changes
    )
    return Worker(info, 0.0, status)


def known(world_module: Any, *workers: tuple[str, StepCost | None] | Worker) -> dict[str, Speed]:
    made = [w if isinstance(w, Worker) else worker(world_module, *w) for w in workers]
    return {ref.node_id: speed for ref, speed in speeds(made).items()}


def test_a_worker_that_never_computed_prompts_is_as_fast_as_its_like(world_module: Any) -> None:
    prefill = StepCost(0.02, 2e-4, 3e-8, 9.0, 9.0, 100, 0.1, num_prompt_samples=100, num_decode_samples=0)
    decode = StepCost(0.01, 9.0, 9.0, 1e-3, 1e-5, 100, 0.1, num_prompt_samples=29, num_decode_samples=100)
    found = known(world_module, ("p", prefill), ("d", decode))
    assert found["d"].cost == StepCost(0.01, 2e-4, 3e-8, 1e-3, 1e-5)
    assert found["p"].cost == StepCost(0.02, 2e-4, 3e-8, 1e-3, 1e-5)
    assert (found["p"].token_budget, found["p"].chunk_size, found["p"].prompt_budget) == (1000, 400, 200)


def test_a_worker_that_has_just_come_is_as_fast_as_the_most_experienced_of_its_kind(world_module: Any) -> None:
    less = StepCost(1.0, 1.0, 1.0, 1.0, 1.0, 40, 0.1, 40, 40)
    assert known(world_module, ("a", less), ("b", COST), ("new", None))["new"].cost == StepCost(
        0.01, 1e-4, 0.0, 1e-3, 1e-5
    )


def test_who_has_tried_a_few_decodes_is_as_fast_as_who_decodes_all_the_time(world_module: Any) -> None:
    prefill = StepCost(0.02, 2e-4, 3e-8, 9.0, 9.0, 2000, 0.1, num_prompt_samples=1000, num_decode_samples=99)
    decode = StepCost(0.01, 9.0, 9.0, 1e-3, 1e-5, 2000, 0.1, num_prompt_samples=99, num_decode_samples=1000)
    found = known(world_module, ("p", prefill), ("d", decode))
    assert found["d"].cost == StepCost(0.01, 2e-4, 3e-8, 1e-3, 1e-5)
    assert found["p"].cost == StepCost(0.02, 2e-4, 3e-8, 1e-3, 1e-5)
    learned = msgspec.structs.replace(prefill, num_decode_samples=100)
    assert known(world_module, ("p", learned), ("d", decode))["p"].cost == StepCost(0.02, 2e-4, 3e-8, 9.0, 9.0)


def test_other_devices_say_nothing(world_module: Any) -> None:
    other = worker(world_module, "other", None, device="NVIDIA H200")
    assert set(known(world_module, ("a", COST), other)) == {"a"}


@pytest.mark.parametrize(
    "cost",
    [
        None,
        msgspec.structs.replace(COST, num_prompt_samples=29),
        msgspec.structs.replace(COST, num_samples=29),
        msgspec.structs.replace(COST, relative_error=0.51),
    ],
)
def test_nothing_is_said_before_it_is_learned(world_module: Any, cost: StepCost | None) -> None:
    assert known(world_module, ("a", cost)) == {}


def test_decodes_that_nobody_has_learned_are_guessed(world_module: Any) -> None:
    cost = msgspec.structs.replace(COST, num_decode_samples=0)
    assert known(world_module, ("a", cost))["a"].cost == StepCost(0.01, 1e-4, 0.0, 1e-3, 1e-5)


def test_without_settings_or_status_nothing_is_known(world_module: Any) -> None:
    silent = Worker(world_module.worker_info("silent", Role.DECODE), 0.0)
    assert speeds([silent, worker(world_module, "a", COST, settings={})]) == {}


def test_a_prompt_budget_that_is_not_said_is_what_decodes_leave(world_module: Any) -> None:
    found = [
        known(world_module, worker(world_module, "a", COST, settings={"token budget": 256}, num_running=running))["a"]
        for running in (0, 100, 250)
    ]
    assert [speed.prompt_budget for speed in found] == [256, 156, 64]
    assert found[0].chunk_size == 256


def test_a_gpu_has_launched_one_step_more(world_module: Any) -> None:
    cpu = worker(world_module, "a", COST)
    gpu = Worker(msgspec.structs.replace(cpu.info, device_kind="cuda"), 0.0, cpu.status)
    steps = [next(iter(speeds([one]).values())).as_decode(8, 0).join_s for one in (cpu, gpu)]
    assert steps == [pytest.approx(0.009), pytest.approx(0.027)]


def test_names_that_both_roles_use(world_module: Any) -> None:
    both = {"token budget": 512, "chunk size": 400, "cap": 64, "decode token budget": 256}
    turned = {"cap": 64, "token budget": 256, "prefill token budget": 512, "chunk size": 400}
    for settings in (both, turned):
        speed = known(world_module, worker(world_module, "a", COST, settings=settings))["a"]
        assert (speed.token_budget, speed.chunk_size, speed.prompt_budget) == (512, 400, 256)


def test_blocks_that_cannot_be_had_are_held(world_module: Any) -> None:
    assert known(world_module, worker(world_module, "a", COST, available_blocks=200))["a"].held_tokens == 56 * 16


# ---- pools -----------------------------------------------------------------------------------------------------------


def test_who_waits_in_the_queue_waits_for_those_who_hold_the_places() -> None:
    assert pool_waits([3.0, 1.0], 0.0, 0, 0) == (1.0, 0.0)
    assert pool_waits([0.0], 8.0, 0, 10) == (0.0, 8.0)
    assert pool_waits([2.0], 8.0, 15, 5) == (2.0 + 6.0, 2.0)
    assert pool_waits([], 8.0, 0, 10) == (0.0, 8.0), "nobody prefills: prompts do not wait for such a worker"


def test_refs_are_lives(world_module: Any) -> None:
    assert list(speeds([worker(world_module, "a", COST)])) == [NodeRef("a", 1)]
