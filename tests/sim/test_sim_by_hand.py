"""Runs small enough to be computed with a pencil, to the microsecond."""

import pytest

from baton.core.trace import TraceRow
from baton.sim.record import SimRecord
from baton.sim.simulation import Simulation
from baton.sim.workload import SimRequest, trace_requests

REQUESTS = [
    SimRequest(0, 0.000, 100, 3, 3),
    SimRequest(1, 0.005, 50, 2, 2),
    SimRequest(2, 0.100, 20, 1, 1),
]


def times_ms(records: list[SimRecord]) -> list[tuple[float, float]]:
    return [(record.ttft_s * 1000, record.last_token_s * 1000) for record in records]


def about(*expected: tuple[float, float]) -> list[object]:
    return [pytest.approx(pair, abs=1e-3) for pair in expected]


def test_one_prefill_and_one_decode_worker(fleet):
    # A reaches P at 1, computes until 21; its KV leaves in 1 and is there at 23; sampled at 25, seen at 26.
    # B computes 21-36 and is there at 37.5, but A's last step runs 36-47: sampled 47-49, seen at 50.
    # A decodes 25-36-47, seen at 48. B decodes 49-60, seen at 61. C: 101-113, there at 114.2, sampled 116.2.
    records = Simulation(fleet(), REQUESTS).run().records
    assert times_ms(records) == about((26, 48), (45, 61), (17.2, 117.2))


def test_colocated_prompts_and_decodes_share_a_step(fleet):
    # A's prompt 1-21. B's prompt with A's decode: 10 + 5 + 1, 21-37. Both decode: 12, until 49. C: 101-113.
    result = Simulation(fleet(num_prefill=0), REQUESTS).run()
    assert times_ms(result.records) == about((22, 50), (33, 50), (14, 114))
    assert sorted(result.gaps) == [(pytest.approx(0.012), 1), (pytest.approx(0.012), 1), (pytest.approx(0.016), 1)]


def test_an_overlapped_step_is_planned_while_the_one_before_runs(fleet):
    # Host time is hidden: A's prompt 3-23 (2 ms of host first), planned meanwhile: its decodes 23-34 and 34-45.
    config = fleet(num_prefill=0, overlaps=True)
    config = type(config)(**{**vars(config), "overheads": type(config.overheads)(per_step_s=0.002)})
    records = Simulation(config, REQUESTS[:1]).run().records
    assert times_ms(records) == about((24, 46))


def test_without_overlap_each_step_waits_for_the_host(fleet):
    config = fleet(num_prefill=0)
    config = type(config)(**{**vars(config), "overheads": type(config.overheads)(per_step_s=0.002)})
    records = Simulation(config, REQUESTS[:1]).run().records
    assert times_ms(records) == about((24, 24 + 2 * 13))


def test_a_cached_prefix_is_neither_computed_nor_sent_again(fleet):
    rows = [TraceRow(0, 1024, 1, (1, 2)), TraceRow(1000, 1024 + 100, 1, (1, 2, 3))]
    result = Simulation(fleet(), trace_requests(rows)).run()
    # 1024 tokens are two steps of at most 1000; then the 100 new ones: P 1-21, wire 1 + 1, sampled 2, message 1
    assert result.records[1].cached_tokens == 1024
    assert result.records[1].ttft_s == pytest.approx(0.026, abs=1e-6)
    assert result.num_prompt_tokens_computed == 1124
    assert result.num_kv_bytes == 1124 * 1000


def test_what_the_model_stops_early_costs_one_surplus_step_of_an_overlapped_loop(fleet):
    config = fleet(num_prefill=0, overlaps=True)
    request = SimRequest(0, 0.0, 100, output_tokens=3, max_tokens=50)
    simulation = Simulation(config, [request])
    result = simulation.run()
    assert result.records[0].output_tokens == 3
    assert result.num_tokens_generated == 3
    assert result.num_steps == {"decode-0": 4}  # prompt, two decodes, and one launched before the last was collected
    assert simulation.idle_faults() == []


def test_too_large_for_the_pool_is_refused_at_once_and_does_not_block_others(fleet):
    # SC01: a request that fits no pool must not stand at the head of the queue for ever
    requests = [SimRequest(0, 0.0, 600, 10, 10), SimRequest(1, 0.0, 100, 10, 10)]
    records = Simulation(fleet(num_blocks=32), requests).run().records
    assert [record.status for record in records] == [400, 200]


def test_a_full_queue_answers_429_with_a_time(fleet):
    config = fleet(num_prefill=0, max_queue=2)
    config = type(config)(**{**vars(config), "decode": type(config.decode)(1000, 1000, 1)})
    records = Simulation(config, [SimRequest(i, 0.0, 100, 100, 100) for i in range(5)]).run().records
    assert [record.status for record in records] == [200, 200, 200, 429, 429]
    assert [record.retry_after_s for record in records[3:]] == [10, 20]  # not all at once


def test_whoever_waits_too_long_gets_429_in_time(fleet):
    config = fleet(num_prefill=0, max_queue_delay_s=0.5)
    config = type(config)(**{**vars(config), "decode": type(config.decode)(1000, 1000, 1)})
    simulation = Simulation(config, [SimRequest(i, 0.0, 100, 100, 100) for i in range(2)])
    records = simulation.run().records
    assert [record.status for record in records] == [200, 429]
    assert 0.5 <= records[1].ended_s <= 0.75
    assert simulation.idle_faults() == []
