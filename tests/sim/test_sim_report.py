"""Reports and calibration."""

import pytest

from baton.core.trace import TraceRow
from baton.sim.calibration import Tally, capacity, share_kept, unloaded_medians_ms
from baton.sim.record import SimRecord
from baton.sim.report import report, windows
from baton.sim.simulation import Simulation
from baton.sim.workload import SimRequest, gamma_requests, trace_requests


def record(index: int, arrived: float, ttft: float, tpot: float, tokens: int = 11, status: int = 200) -> SimRecord:
    first = arrived + ttft
    last = first + tpot * (tokens - 1)
    return SimRecord(index, arrived, 100, status, 0, tokens, first, last, last)


def test_windows_count_requests_by_arrival_and_the_refused_as_missed():
    records = [
        record(0, 1.0, 0.1, 0.01),
        record(1, 2.0, 0.9, 0.01),  # TTFT too long
        record(2, 9.0, 0.1, 0.09),  # TPOT too long
        record(3, 25.0, 0.1, 0.01),
        SimRecord(4, 26.0, 100, status=429),
    ]
    found = windows(records, {"ttft": 500, "tpot": 50}, 10.0)
    assert [(w.start_s, w.arrived, w.refused, w.kept) for w in found] == [(0, 3, 0, 1), (20, 2, 1, 1)]
    assert [w.attainment for w in found] == pytest.approx([1 / 3, 1 / 2])
    assert [w.goodput for w in found] == pytest.approx([0.1, 0.1])


def test_a_report_of_a_run_computed_by_hand(fleet):
    # the colocated run of test_sim_by_hand.py: TTFT 22, 33, 14 ms; seen last at 50, 50, 114 ms
    requests = [SimRequest(0, 0.0, 100, 3, 3), SimRequest(1, 0.005, 50, 2, 2), SimRequest(2, 0.1, 20, 1, 1)]
    found = report(Simulation(fleet(num_prefill=0), requests).run(), {"ttft": 25, "tpot": 20}, 60.0)
    assert found.completed == 3
    assert found.ttft_ms is not None
    assert found.ttft_ms.median == pytest.approx(22)
    assert found.tpot_ms is not None
    assert found.tpot_ms.mean == pytest.approx((14 + 12) / 2)
    assert found.itl_ms is not None
    assert found.itl_ms.mean == pytest.approx((12 + 12 + 16) / 3)
    assert found.attainment == pytest.approx(2 / 3)
    assert found.utilisation["decode-0"] * found.virtual_s == pytest.approx(0.020 + 0.016 + 0.012 + 0.012)
    assert found.speed > 0


def test_unloaded_medians_are_those_of_single_requests(fleet):
    rows = [TraceRow(0, n, 5) for n in (100, 200, 300)]
    ttft, tpot = unloaded_medians_ms(fleet(num_prefill=0), rows)
    assert ttft == pytest.approx(1 + 10 + 20 + 1)
    assert tpot == pytest.approx(11)


def test_capacity_is_where_requests_begin_to_miss(fleet):
    # one prompt of 100 tokens a step of 20 ms at most: 50 a second, if waiting cost nothing
    config = fleet(num_prefill=0)
    rows = [TraceRow(r.arrival_s * 1000, 100, 1) for r in gamma_requests(400, 1.0, 1.0, 100, 1)]
    limits = {"ttft": 100.0}

    def requests_at(rate: float) -> list[SimRequest]:
        return trace_requests(rows, rate)

    found = capacity(config, requests_at, limits)
    assert 50 < found < 200  # prompts share steps

    def share(rate: float) -> float:
        return share_kept(Simulation(config, requests_at(rate)).run().records, limits)

    assert share(found) >= 0.9 > share(found * 1.2)


def tally(limits: dict[str, float]) -> Tally:
    requests = [SimRequest(i, at, 100, 11, 11) for i, at in enumerate((1.0, 5.0, 12.0, 25.0))]
    return Tally(requests, [(0.0, 10.0), (20.0, 30.0)], limits)


def test_a_tally_counts_by_span_of_arrival_once_each_request_is_decided():
    counted = tally({"ttft": 500, "tpot": 50})
    assert counted.arrived == [2, 1]
    waiting = SimRecord(1, 5.0, 100)
    records = [record(0, 1.0, 0.1, 0.01), waiting, record(2, 12.0, 0.1, 0.01)]  # the last one is in no span
    counted.update(records, 5.2)
    assert (counted.kept, counted.missed, counted.most) == ([1, 0], [0, 0], 3)
    waiting.status = 429
    records.append(record(3, 25.0, 0.9, 0.01))
    counted.update(records, 26.0)
    assert (counted.kept, counted.missed, counted.is_complete) == ([1, 0], [1, 1], True)


@pytest.mark.parametrize(
    ("first_token_s", "now", "is_missed"),
    [
        (0.0, 1.4, False),  # its first token may still come in time
        (0.0, 1.6, True),
        (1.2, 1.6, False),  # ten more tokens at 50 ms may take half a second
        (1.2, 1.75, True),
        (1.6, 1.61, True),
    ],
)
def test_a_tally_knows_who_must_miss_before_the_end(first_token_s: float, now: float, is_missed: bool):
    counted = tally({"ttft": 500, "tpot": 50})
    running = SimRecord(0, 1.0, 100, output_tokens=int(first_token_s > 0), first_token_s=first_token_s)
    counted.update([running], now)
    assert counted.missed[0] == is_missed


def test_a_run_that_is_decided_ends_early(fleet):
    requests = gamma_requests(200, 5.0, 1.0, 100, 20)
    counted = Tally(requests, [(0.0, 10.0)], {"ttft": 500})

    def is_decided(records: list[SimRecord], now: float) -> bool:
        counted.update(records, now)
        return counted.is_complete

    result = Simulation(fleet(), requests).run(is_decided)
    assert 10 < result.virtual_s < 15
    whole = Simulation(fleet(), requests).run()
    assert sum(counted.kept) == sum(r.arrived_s < 10 and r.ttft_s <= 0.5 for r in whole.records)
