"""Workers whose tuners may move their limits: production's pacing, learning from simulated steps."""

import statistics

import msgspec

from baton.sim.simulation import SimResult, Simulation
from baton.sim.workload import gamma_requests


def run(fleet, **ranges: object) -> SimResult:
    limits = msgspec.structs.replace(fleet().decode, tpot_target_s=0.030, **ranges)
    simulation = Simulation(fleet(prefill=limits, decode=limits), gamma_requests(400, 8.0, 1.0, 100, 100))
    result = simulation.run()
    assert simulation.idle_faults() == []
    return result


RANGES = {"token_budget_range": (128, 4096), "max_running_range": (1, 64)}


def median_tpot_s(result: SimResult) -> float:
    return statistics.median(record.tpot_s or 0.0 for record in result.records if record.arrived_s > 30)


def test_tuners_move_the_limits_of_the_schedulers_that_run(fleet):
    # 800 tokens/s are offered; a step of 10 ms + 1 ms a sequence makes them 40 at a time, in 50 ms; 30 ms allow 20
    assert median_tpot_s(run(fleet)) > 0.045
    assert median_tpot_s(run(fleet, **RANGES)) < 0.033


def test_tuned_runs_repeat(fleet):
    first, second = run(fleet, **RANGES), run(fleet, **RANGES)
    assert first.tuned == second.tuned
    assert first.tuned
    assert first.records == second.records


def test_without_ranges_nothing_moves(fleet):
    assert Simulation(fleet(), gamma_requests(50, 8.0, 1.0, 100, 20)).run().tuned == []
