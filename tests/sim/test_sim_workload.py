"""Workloads: who shares what, and when they come."""

import itertools

import pytest

from baton.core.trace import TraceRow
from baton.sim.workload import LoadStep, SimRequest, gamma_requests, stepped_requests, trace_requests

ROWS = [TraceRow(t, 1000, 10) for t in (0, 100, 300, 600)]


def prompt(index: int, num_tokens: int, *hash_ids: int) -> list[int]:
    return SimRequest(index, 0.0, num_tokens, 1, 1, hash_ids).prompt_token_ids()


def shared(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_prompts_share_exactly_the_blocks_whose_ids_they_share():
    a, b = prompt(0, 1500, 1, 2, 3), prompt(1, 1600, 1, 2, 4, 5)
    assert (len(a), len(b)) == (1500, 1600)
    assert shared(a, b) == 1024
    assert shared(a, prompt(2, 1400, 1, 2, 3)) == 1400
    assert shared(prompt(0, 512, 7), prompt(1, 512, 8)) == 0


def test_what_has_no_id_is_its_own():
    assert shared(prompt(0, 600, 1), prompt(1, 600, 1)) == 512
    assert shared(prompt(0, 300), prompt(1, 300)) == 0


def test_a_rate_stretches_time_and_keeps_bursts():
    requests = trace_requests(ROWS, rate=2.0)
    assert [r.arrival_s for r in requests] == pytest.approx([0, 2 / 6, 1, 2])
    assert [r.arrival_s for r in trace_requests(ROWS)] == pytest.approx([0, 0.1, 0.3, 0.6])


def test_clients_ask_for_at_least_what_they_get():
    assert {r.max_tokens for r in trace_requests(ROWS)} == {10}
    assert {r.max_tokens for r in trace_requests(ROWS, max_tokens=64)} == {64}
    assert {r.max_tokens for r in trace_requests(ROWS, max_tokens=4)} == {10}


def test_a_load_changes_in_steps_and_a_short_trace_starts_again_with_new_contents():
    rows = [TraceRow(1000 * i, 512, 1, (i,)) for i in range(10)]
    requests = stepped_requests(rows, [LoadStep(1.0, 100), LoadStep(4.0, 50), LoadStep(1.0, 100)])
    counts = [sum(start <= r.arrival_s < stop for r in requests) for start, stop in ((0, 100), (100, 150), (150, 250))]
    assert counts == [100, 200, 100]
    assert len({r.hash_ids for r in requests}) == len(requests)
    assert [r.index for r in requests] == list(range(400))


def test_jitter_spreads_a_tick_and_keeps_order():
    rows = [TraceRow(0, 10, 1)] * 50 + [TraceRow(3000, 10, 1)] * 50
    times = [r.arrival_s for r in trace_requests(rows, jitter_s=3.0)]
    assert times == sorted(times)
    assert len(set(times)) == 100
    assert max(times) <= 6.0


def test_gamma_arrivals_have_the_rate_and_the_burstiness_asked_for():
    for cv in (0.5, 1.0, 3.0):
        times = [r.arrival_s for r in gamma_requests(20_000, 10.0, cv, 10, 1, seed=3)]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert mean == pytest.approx(0.1, rel=0.08)
        assert deviation / mean == pytest.approx(cv, rel=0.08)
