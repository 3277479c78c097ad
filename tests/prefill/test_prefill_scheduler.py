"""PrefillScheduler by literals: order, packing, budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.config import SchedulerConfig
from baton.core.queueing import Waiting
from baton.prefill.scheduler import PlannedChunk, PrefillScheduler


def make(token_budget: int = 8, chunk_size: int = 8, max_running: int = 4, max_waiting: int = 4) -> PrefillScheduler:
    return PrefillScheduler(SchedulerConfig(token_budget, chunk_size, max_running, max_waiting))


def admit_all(scheduler: PrefillScheduler, lengths: dict[str, int]) -> None:
    for request_id, length in lengths.items():
        scheduler.add(Waiting(request_id, 0.0, length))
    while (request_id := scheduler.next_waiting(0.0)) is not None:
        scheduler.admit(request_id, lengths[request_id])


def test_many_prompts_are_packed_into_one_step_in_order_of_arrival() -> None:
    scheduler = make(token_budget=8)
    admit_all(scheduler, {"a": 3, "b": 4, "c": 5})
    assert scheduler.plan() == [PlannedChunk("a", 3, True), PlannedChunk("b", 4, True), PlannedChunk("c", 1, False)]


def test_a_long_prompt_advances_by_chunks() -> None:
    scheduler = make(token_budget=8, chunk_size=4)
    admit_all(scheduler, {"long": 10, "short": 2})
    plan = scheduler.plan()
    assert plan == [PlannedChunk("long", 4, False), PlannedChunk("short", 2, True)]
    scheduler.launched(plan)
    assert scheduler.plan() == [PlannedChunk("long", 4, False)]
    scheduler.launched(scheduler.plan())
    assert scheduler.plan() == [PlannedChunk("long", 2, True)]


def test_only_so_many_run_and_the_others_wait_their_turn() -> None:
    scheduler = make(max_running=1)
    admit_all(scheduler, {"a": 2, "b": 2})
    assert scheduler.plan() == [PlannedChunk("a", 2, True)]
    assert scheduler.next_waiting(0.0) is None
    scheduler.launched(scheduler.plan())
    assert scheduler.next_waiting(0.0) == "b"


def test_waiting_tokens_count_what_no_step_has_taken_up() -> None:
    scheduler = make()
    admit_all(scheduler, {"a": 5})
    scheduler.add(Waiting("b", 0.0, 7))
    assert scheduler.num_waiting_tokens == 12
    scheduler.launched([PlannedChunk("a", 3, False)])
    assert scheduler.num_waiting_tokens == 9


def test_the_queue_has_a_bound() -> None:
    scheduler = make(max_waiting=1)
    scheduler.add(Waiting("a", 0.0, 1))
    assert scheduler.is_full


def test_removing_works_in_any_phase() -> None:
    scheduler = make(max_running=1)
    admit_all(scheduler, {"running": 4, "waiting": 4})
    for request_id in ("running", "waiting", "unknown"):
        scheduler.remove(request_id)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_waiting_tokens) == (0, 0, 0)
    assert scheduler.next_waiting(0.0) is None


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), token_budget=st.integers(1, 24))
def test_every_prompt_is_computed_exactly_once(chunk_size: int, lengths: list[int], token_budget: int) -> None:
    scheduler = make(token_budget, chunk_size, max_running=3, max_waiting=100)
    named = {f"r{i}": n for i, n in enumerate(lengths)}
    computed = dict.fromkeys(named, 0)
    for request_id, length in named.items():
        scheduler.add(Waiting(request_id, 0.0, length))
    done = []
    while len(done) < len(named):
        while (request_id := scheduler.next_waiting(0.0)) is not None:
            scheduler.admit(request_id, named[request_id])
        plan = scheduler.plan()
        assert plan, "a scheduler with work always plans some"
        assert sum(chunk.num_tokens for chunk in plan) <= token_budget
        for chunk in plan:
            assert 0 < chunk.num_tokens <= chunk_size
            computed[chunk.request_id] += chunk.num_tokens
            if chunk.is_last:
                done.append(chunk.request_id)
        scheduler.launched(plan)
    assert computed == named
    assert sorted(done) == sorted(named)
