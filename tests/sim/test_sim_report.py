"""Reports and calibration."""

import pytest

from baton.core.trace import TraceRow
from baton.sim.calibration import attainment, capacity, unloaded_medians_ms
from baton.sim.record import SimRecord
from baton.sim.report import report, windows
from baton.sim.simulation import Simulation
from baton.sim.workload import SimRequest, gamma_requests


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
    found = capacity(config, rows, limits)
    assert 50 < found < 200  # prompts share steps

    def share(rate: float) -> float:
        from baton.sim.workload import trace_requests

        return attainment(Simulation(config, trace_requests(rows, rate)).run(), limits)

    assert share(found) >= 0.9 > share(found * 1.2)
