"""Workers whose tuners may move their limits: production's pacing, learning from simulated steps."""

import msgspec

from baton.sim.simulation import SimResult, Simulation
from baton.sim.workload import gamma_requests


def run(fleet, tpot_target_s: float | None) -> SimResult:
    limits = msgspec.structs.replace(
        fleet().decode, token_budget_range=(128, 4096), max_running_range=(1, 64), tpot_target_s=tpot_target_s
    )
    simulation = Simulation(fleet(prefill=limits, decode=limits), gamma_requests(400, 8.0, 1.0, 100, 100))
    result = simulation.run()
    assert simulation.idle_faults() == []
    return result


def test_a_cap_is_found_that_keeps_the_target(fleet):
    # a decode step takes 10 ms + 1 ms a sequence: at most 20 keep 30 ms
    tpots = [record.tpot_s or 0.0 for record in run(fleet, 0.030).records if record.arrived_s > 30]
    assert sum(tpot <= 0.030 for tpot in tpots) >= 0.9 * len(tpots)


def test_tuned_runs_repeat(fleet):
    first, second = run(fleet, 0.030), run(fleet, 0.030)
    assert first.tuned == second.tuned
    assert first.tuned
    assert first.records == second.records


def test_without_ranges_nothing_moves(fleet):
    assert Simulation(fleet(), gamma_requests(50, 8.0, 1.0, 100, 20)).run().tuned == []
