"""Who is served when there is more than can be done: overload, classes, keys, batch. Minutes of virtual time."""

import dataclasses

import msgspec
import pytest

from baton.core.queueing import FAIR, PRIORITY
from baton.core.request import Urgency
from baton.sim.record import SimRecord
from baton.sim.simulation import Simulation
from baton.sim.workload import SimRequest, gamma_requests, merged, with_urgency

pytestmark = pytest.mark.slow

TTFT_S, TPOT_S = 1.0, 0.050


def overloaded(fleet):
    """A colocated worker: prompts of 100 take 10 ms, 24 decodes 34 ms; targets of 1 s and 50 ms."""
    limits = msgspec.structs.replace(
        fleet().decode,
        max_running=24,
        token_budget_range=(64, 1000),
        max_running_range=(1, 64),
        ttft_target_s=TTFT_S,
        tpot_target_s=TPOT_S,
    )
    return fleet(num_prefill=0, prefill=limits, decode=limits, policy=FAIR, ttft_target_s=TTFT_S, tpot_target_s=TPOT_S)


def from_to(rate: float, start: float, stop: float, seed: int) -> list[SimRequest]:
    """Prompts of 100 tokens and answers of 50."""
    found = gamma_requests(int(rate * (stop - start)), rate, 1.0, 100, 50, seed)
    return [dataclasses.replace(request, arrival_s=request.arrival_s + start) for request in found]


def kept(record: SimRecord) -> bool:
    return record.status == 200 and record.ttft_s <= TTFT_S and (record.tpot_s or 0.0) <= TPOT_S


def test_three_times_what_can_be_done_for_ten_minutes(fleet):
    capacity = 9.0  # requests/s, about: 20 of them take 40 ms a step
    requests = merged(
        from_to(0.5 * capacity, 0, 60, 1), from_to(3 * capacity, 60, 660, 2), from_to(0.5 * capacity, 660, 780, 3)
    )
    simulation = Simulation(overloaded(fleet), requests)
    sizes: list[int] = []

    def sample() -> None:
        sizes.append(len(simulation.gateway.dispatcher._generations) + len(simulation.clock._events))
        if simulation.clock.now < 650:
            simulation.clock.after(5.0, sample)

    simulation.clock.at(120.0, sample)
    records = simulation.run().records
    assert simulation.idle_faults() == []

    during = [record for record in records if 60 <= record.arrived_s < 660]
    accepted = [record for record in during if record.status == 200]
    refused = [record for record in during if record.status != 200]
    assert len(accepted) + len(refused) == len(during)
    assert {record.status for record in refused} == {429}
    assert len(accepted) > 0.75 * capacity * 600  # what can be done is done
    assert sum(map(kept, accepted)) >= 0.9 * len(accepted)
    assert max(record.ended_s - record.arrived_s for record in refused) <= TTFT_S + 0.25  # ticks are so far apart
    assert all(record.retry_after_s for record in refused)

    after = [record for record in records if record.arrived_s >= 670]
    assert sum(map(kept, after)) >= 0.99 * len(after)
    assert max(sizes[60:]) <= 1.5 * max(sizes[:60])  # nothing grows


def shares(records: list[SimRecord], requests: list[SimRequest], start: float, stop: float) -> dict[str, int]:
    """Tokens, prompt and answer, of what ended from `start` to `stop`, by key."""
    found: dict[str, int] = {}
    for record in records:
        if record.status == 200 and start <= record.ended_s < stop:
            key = requests[record.index].urgency.key
            found[key] = found.get(key, 0) + record.prompt_tokens + record.output_tokens
    return found


def test_two_keys_with_ten_to_one_load_get_the_same(fleet):
    config = dataclasses.replace(overloaded(fleet), ttft_target_s=None, max_queue=10_000, max_queue_delay_s=1e9)
    requests = merged(
        with_urgency(from_to(100, 0, 60, 1), Urgency(key="loud")),
        with_urgency(from_to(10, 0, 60, 2), Urgency(key="quiet")),
    )
    simulation = Simulation(config, requests)
    found = shares(simulation.run().records, requests, 10, 60)
    assert found["loud"] / found["quiet"] == pytest.approx(1.0, abs=0.1)
    assert simulation.idle_faults() == []


def test_the_lowest_class_moves_under_continuous_high_priority_load(fleet):
    config = dataclasses.replace(
        overloaded(fleet), policy=PRIORITY, ttft_target_s=None, max_queue=10_000, max_queue_delay_s=1e9
    )
    low = with_urgency(from_to(0.5, 0, 120, 1), Urgency(priority=4))
    requests = merged(low, with_urgency(from_to(14, 0, 120, 2), Urgency(priority=0)))
    simulation = Simulation(config, requests)
    records = simulation.run().records
    waits = [r.ttft_s for r in records if requests[r.index].urgency.priority == 4 and r.arrived_s < 60]
    assert max(waits) < 4 * PRIORITY.ageing_s + 10.0  # as the highest after four times `ageing_s`
    assert simulation.idle_faults() == []


def test_batch_fills_what_interactive_requests_leave(fleet):
    config = dataclasses.replace(overloaded(fleet), ttft_target_s=None, max_queue=10_000, max_queue_delay_s=1e9)
    interactive = from_to(4, 0, 120, 1)
    batch = with_urgency([SimRequest(i, 0.0, 100, 50, 50) for i in range(400)], Urgency(is_batch=True))
    alone = Simulation(config, merged(interactive)).run()
    requests = merged(interactive, batch)
    simulation = Simulation(config, requests)
    together = simulation.run()
    assert simulation.idle_faults() == []

    def ttfts(records: list[SimRecord], numbered: list[SimRequest]) -> list[float]:
        return sorted(r.ttft_s for r in records if not numbered[r.index].urgency.is_batch)

    quiet, busy = ttfts(alone.records, merged(interactive)), ttfts(together.records, requests)
    assert busy[len(busy) * 9 // 10] <= quiet[len(quiet) * 9 // 10] + 0.050  # about one step more
    ended = [r.ended_s for r in together.records if requests[r.index].urgency.is_batch and r.status == 200]
    assert len(ended) == 400
    assert max(ended) < 120  # half of what can be done is left to it
