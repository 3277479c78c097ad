"""What must hold in every run: determinism, conservation, queueing theory, progress."""

import random

import pytest

from baton.core.config import SchedulerConfig
from baton.core.trace import TraceRow
from baton.gateway.cluster import TICK_INTERVAL_S
from baton.sim import gateway
from baton.sim.simulation import SimResult, Simulation
from baton.sim.workload import SimRequest, gamma_requests, trace_requests


def chats(seed: int, count: int = 60) -> list[TraceRow]:
    """Turns of a few chats, bursts included: each turn's prompt begins with that of the turn before."""
    generator = random.Random(seed)
    histories: dict[int, list[int]] = {}
    rows, now = [], 0.0
    for number in range(count):
        now += generator.choice([0, 0, 20, 200])
        history = histories.setdefault(generator.randrange(8), [])
        history += [1000 * number + i for i in range(generator.choice([0, 1, 1, 3]))]
        tail = generator.randrange(1, 512)
        rows.append(TraceRow(now, 512 * len(history) + tail, generator.randrange(1, 80), tuple(history)))
    return rows


TOPOLOGIES = {
    "1P1D": {},
    "2P2D": {"num_prefill": 2, "num_decode": 2},
    "colocated": {"num_prefill": 0, "num_decode": 2},
    "overlapped": {"overlaps": True},
    "overlapped, colocated, small": {"num_prefill": 0, "overlaps": True, "num_blocks": 900},
    "small": {"num_blocks": 900},
    "slow link": {"link": None},
}


def build(fleet, name: str):
    changes = dict(TOPOLOGIES[name])
    if "link" in changes:
        changes["link"] = type(fleet().link)(1000, 1e6, 0.01, 4)
    return fleet(**changes, max_queue=1000, max_queue_delay_s=1e9)


def run(fleet, name: str, seed: int, max_tokens: int | None = None) -> tuple[Simulation, SimResult]:
    rows = [row for row in chats(seed) if row.input_length + (max_tokens or row.output_length) <= 900 * 16]
    simulation = Simulation(build(fleet, name), trace_requests(rows, max_tokens=max_tokens))
    return simulation, simulation.run()


@pytest.mark.parametrize("max_tokens", [None, 300])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_request_ends_once_and_every_block_comes_back(fleet, name: str, max_tokens: int | None):
    for seed in range(3):
        simulation, result = run(fleet, name, seed, max_tokens)
        assert simulation.idle_faults() == []
        asked = [request.output_tokens for request in simulation._requests]
        assert [record.output_tokens for record in result.records] == asked
        assert result.num_tokens_generated == sum(asked)
        assert sum(count for _, count in result.gaps) == sum(asked) - len(asked)
        assert all(record.status == 200 and record.first_token_s <= record.last_token_s for record in result.records)
        if not result.num_preemptions:
            uncached = sum(record.prompt_tokens - record.cached_tokens for record in result.records)
            assert result.num_prompt_tokens_computed == uncached


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_same_run_twice_is_the_same(fleet, name: str):
    (_, first), (_, second) = run(fleet, name, 7), run(fleet, name, 7)
    assert first.records == second.records
    assert first.gaps == second.gaps
    assert first.virtual_s == second.virtual_s


def test_gaps_add_up_to_what_records_say(fleet):
    """Inter-token latencies, kept by step, against the streams' own length."""
    for name in ("1P1D", "colocated", "overlapped"):
        _, result = run(fleet, name, 3)
        total = sum(seconds * count for seconds, count in result.gaps)
        assert total == pytest.approx(sum(r.last_token_s - r.first_token_s for r in result.records))


def test_waiting_is_that_of_a_queue_with_one_server(fleet):
    """One prompt a step, equal steps: Lindley's recursion, request by request. And Little's law by sampling."""
    one_prompt = SchedulerConfig(token_budget=100, chunk_size=100, max_running=1000)
    config = fleet(num_prefill=0, decode=one_prompt, message_s=0.0)
    rate, service = 25.0, 0.020
    requests = gamma_requests(4000, rate, 1.0, 100, 1, seed=1)
    simulation = Simulation(config, requests)
    samples: list[int] = []

    def sample() -> None:
        samples.append(simulation.gateway.dispatcher.num_in_flight)
        if simulation.clock.now < requests[-1].arrival_s:
            simulation.clock.after(0.037, sample)

    simulation.clock.at(0.0, sample)
    records = simulation.run().records
    free_at = 0.0
    for record in records:
        free_at = max(free_at, record.arrived_s) + service
        assert record.first_token_s == pytest.approx(free_at, abs=1e-9)
    mean_time = sum(record.e2el_s for record in records) / len(records)
    arrival_rate = len(records) / requests[-1].arrival_s
    assert sum(samples) / len(samples) == pytest.approx(arrival_rate * mean_time, rel=0.03)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("num_prefill", [0, 1])
def test_a_tiny_pool_finishes_everything(fleet, num_prefill: int, overlaps: bool):
    """64 blocks, 4 requests that grow to 40 each; whoever runs gets tokens."""
    config = fleet(num_prefill=num_prefill, num_blocks=64, overlaps=overlaps)
    simulation = Simulation(config, [SimRequest(i, 0.001 * i, 16, 624, 624) for i in range(4)])
    result = simulation.run()
    assert [record.output_tokens for record in result.records] == [624] * 4
    assert result.num_preemptions > 0
    assert simulation.idle_faults() == []


def test_a_preempted_sequence_is_not_preempted_at_every_step(fleet):
    """SC08: resumed only when it fits with room to grow."""
    simulation = Simulation(fleet(num_prefill=0, num_blocks=64), [SimRequest(i, 0.0, 16, 624, 624) for i in range(4)])
    result = simulation.run()
    assert result.num_preemptions <= 20
    assert result.num_steps["decode-0"] <= 4 * 640


def test_an_answer_that_takes_long_is_not_taken_for_a_dead_one(fleet):
    """The gateway gives up what says nothing for 300 s."""
    simulation = Simulation(fleet(), [SimRequest(0, 0.0, 16, 15_000, 15_000)])
    result = simulation.run()
    assert result.virtual_s == pytest.approx(0.011 * 15_000, rel=0.01)
    assert result.records[0].output_tokens == 15_000
    slow = fleet(device=type(fleet().device)(type(fleet().device.cost)(0.1, 0.0, 0.0, 0.0, 0.0)))
    result = Simulation(slow, [SimRequest(0, 0.0, 16, 5_000, 5_000)]).run()
    assert result.virtual_s > 490
    assert result.records[0].output_tokens == 5_000


def test_long_idle_costs_nothing(fleet):
    simulation = Simulation(fleet(), [SimRequest(0, 0.0, 16, 2, 2), SimRequest(1, 1e7, 16, 2, 2)])
    simulation.run()
    assert simulation.clock.num_events < 150


def test_the_gateway_ticks_as_in_production():
    assert gateway.TICK_INTERVAL_S == TICK_INTERVAL_S
