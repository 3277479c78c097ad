"""`--elastic` with both targets: workers divide themselves as the requests need it, and stay as they are otherwise."""

import dataclasses

import msgspec
import pytest

from baton.sim.record import SimRecord
from baton.sim.simulation import Simulation
from baton.sim.workload import SimRequest, gamma_requests, merged

TTFT_S, TPOT_S = 1.0, 0.0155
LONG_PROMPTS, LONG_ANSWERS = (500, 20), (50, 200)


def requests(seconds: float, rate: float, lengths: tuple[int, int], begin_s: float = 0.0) -> list[SimRequest]:
    found = gamma_requests(int(seconds * rate), rate, 1.0, *lengths)
    return [dataclasses.replace(request, arrival_s=request.arrival_s + begin_s) for request in found]


def simulate(
    fleet, load: list[SimRequest], *, is_elastic: bool = True, **changes
) -> tuple[list[dict], list[SimRecord]]:
    """Changes of roles, and what became of the requests."""
    limits = msgspec.structs.replace(
        fleet().decode,
        token_budget_range=(128, 4096),
        max_running_range=(1, 64),
        ttft_target_s=TTFT_S,
        tpot_target_s=TPOT_S,
    )
    config = fleet(
        prefill=limits, decode=limits, ttft_target_s=TTFT_S, tpot_target_s=TPOT_S, is_elastic=is_elastic, **changes
    )
    simulation = Simulation(config, load)
    records = simulation.run().records
    assert simulation.idle_faults() == []
    return simulation.gateway.role_changes, records


def num_in_time(records: list[SimRecord]) -> int:
    return sum(
        record.status == 200 and record.first_token_s - record.arrived_s <= TTFT_S and (record.tpot_s or 0.0) <= TPOT_S
        for record in records
    )


@pytest.mark.slow
def test_with_long_answers_both_workers_decode_and_more_requests_are_in_time(fleet) -> None:
    # An answer takes 200 x 1 ms of decode steps, which may be full of decodes to a third: 1.7 a second on one worker.
    load = requests(120, 2.6, LONG_ANSWERS)
    changes, records = simulate(fleet, load)
    assert [(change["worker"], change["new"]) for change in changes] == [("prefill-0", "decode")]
    assert num_in_time(records) > 1.15 * num_in_time(simulate(fleet, load, is_elastic=False)[1])


def test_with_long_prompts_roles_stay(fleet) -> None:
    changes, records = simulate(fleet, requests(60, 8.0, LONG_PROMPTS))
    assert changes == []
    assert num_in_time(records) > 0.9 * len(records)


@pytest.mark.slow
def test_who_begins_divided_wrongly_soon_keeps_as_many_in_time_as_who_was_right_from_the_start(fleet) -> None:
    """As production does, workers know what their steps cost when they join. Of the first 20 s much is lost."""
    load = requests(60, 2.6, LONG_ANSWERS)
    _, elastic = simulate(fleet, load, is_calibrated=True)
    _, colocated = simulate(fleet, load, is_elastic=False, is_calibrated=True, num_prefill=0, num_decode=2)
    later = slice(sum(request.arrival_s < 20 for request in load), None)
    assert num_in_time(elastic[later]) >= 0.95 * num_in_time(colocated[later])


def test_calibrated_workers_are_known_before_the_first_request(fleet) -> None:
    simulation = Simulation(fleet(is_calibrated=True), requests(1, 2.0, LONG_PROMPTS))
    costs = [worker.bench.steps.cost for worker in simulation.workers]
    assert all(cost.knows_prompts and cost.knows_decodes for cost in costs)
    assert [cost.base_s for cost in costs] == pytest.approx([0.010] * 2, rel=0.02)
    assert [cost.per_decode_s for cost in costs] == pytest.approx([0.001] * 2, rel=0.1)
    assert all(worker.bench.num_steps == worker.bench.busy_s == 0 for worker in simulation.workers)


def test_roles_change_between_requests_too(fleet) -> None:
    """20 requests, one after the other with seconds between: the planner looks while nobody is there."""
    load = [dataclasses.replace(request, arrival_s=5.0 * request.index) for request in requests(20, 1.0, LONG_ANSWERS)]
    changes, records = simulate(fleet, load, is_calibrated=True)
    assert [(change["worker"], change["new"]) for change in changes] == [("prefill-0", "decode")]
    assert num_in_time(records) == len(records) == 20


DIVISIONS = [{"num_prefill": 1, "num_decode": 1}, {"num_prefill": 0, "num_decode": 2}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "rate"),
    [(LONG_ANSWERS, 2.6), ((1000, 60), 2.0)],
    ids=["long answers", "between"],
)
def test_elastic_is_not_below_the_better_division(fleet, lengths: tuple[int, int], rate: float) -> None:
    """Over 150 s, from 1 prefill and 1 decode worker: what is lost until roles are right is little beside it."""
    load = requests(150, rate, lengths)
    _, elastic = simulate(fleet, load, is_calibrated=True)
    better = max(
        num_in_time(simulate(fleet, load, is_elastic=False, is_calibrated=True, **division)[1])
        for division in DIVISIONS
    )
    assert num_in_time(elastic) >= 0.95 * better


@pytest.mark.slow
def test_roles_follow_a_load_that_becomes_another_one(fleet) -> None:
    phases = [requests(60, 2.5, LONG_ANSWERS), requests(60, 8.0, LONG_PROMPTS, 62.0)]
    changes, _ = simulate(fleet, merged(*phases))
    assert [change["new"] for change in changes][:2] == ["decode", "prefill"]
    assert len(changes) == 2


@pytest.mark.slow
def test_a_mix_that_alternates_every_few_seconds_changes_nothing_more_than_once(fleet) -> None:
    phases = [requests(3, 4.0, LONG_ANSWERS if index % 2 else LONG_PROMPTS, 3.0 * index) for index in range(40)]
    assert len(simulate(fleet, merged(*phases))[0]) <= 1
