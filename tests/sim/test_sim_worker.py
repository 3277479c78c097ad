"""One worker with both roles on one device, by hand; and what it tells the gateway."""

import pytest

from baton.core.messages import GenerateRequest, Message, NodeRef, PrefillRequest, Role, SetRoles, Status, TokenChunk
from baton.core.request import Request, SamplingParams
from baton.sim import worker
from baton.sim.answers import Answers
from baton.sim.simulation import FleetConfig, Simulation
from baton.sim.workload import gamma_requests
from baton.worker import worker as production

GATEWAY = NodeRef("gateway-0", 1)
BOTH = (Role.PREFILL, Role.DECODE)


class World:
    """Two workers that do as this test says, in the gateway's place."""

    def __init__(self, config: FleetConfig, lengths: list[int]):
        simulation = Simulation(config, [])
        self.clock, self.network, self.workers = simulation.clock, simulation.network, simulation.workers
        for each in self.workers:
            each.decode._answers = Answers(lengths)
        self.seen: list[tuple[float, NodeRef, Message]] = []
        self.network.join(GATEWAY, lambda sender, message: self.seen.append((self.clock.now, sender, message)))

    def tell_at(self, when: float, index: int, message: Message) -> None:
        self.clock.at(when, lambda: self.network.send(GATEWAY, self.workers[index].ref, message))

    def tokens_ms(self, request_id: str) -> list[tuple[float, int]]:
        """When the gateway heard of how many tokens."""
        return [
            (pytest.approx(now * 1000, abs=1e-6), m.index + len(m.token_ids))
            for now, _, m in self.seen
            if isinstance(m, TokenChunk) and m.request_id == request_id
        ]


def generate(name: str, seed: int, num_tokens: int, max_tokens: int, prefill: NodeRef | None) -> GenerateRequest:
    prompt = [1000 * (seed + 1) + i for i in range(num_tokens)]
    return GenerateRequest(Request(name, "", prompt, SamplingParams(seed=seed, max_tokens=max_tokens)), prefill)


def run_both(fleet, *, overlaps: bool) -> World:
    """A generates for one request and computes the prompt of another, which B generates for."""
    world = World(fleet(num_prefill=0, num_decode=2, overlaps=overlaps), [3, 2])
    a, b = (each.ref for each in world.workers)
    world.tell_at(0.000, 0, generate("own", 0, 100, 3, None))
    lent = generate("lent", 1, 50, 2, a)
    world.tell_at(0.024, 0, PrefillRequest("lent", "", lent.request.prompt_token_ids, b))
    world.tell_at(0.024, 1, lent)
    world.clock.run()
    assert [each.num_requests for each in world.workers] == [0, 0]
    assert world.network.num_handovers == 0
    return world


def test_where_the_device_is_the_loops_own_the_roles_take_turns(fleet):
    # own: prompt 1-21, decode 21-32. Read at 32: the lent prompt computes 32-47, then own decodes 47-58.
    # The KV is at B at 48.5, sampled 50.5, decoded until 61.5.
    world = run_both(fleet, overlaps=False)
    assert world.tokens_ms("own") == [(22, 1), (59, 3)]
    assert world.tokens_ms("lent") == [(51.5, 1), (62.5, 2)]


def test_where_steps_overlap_the_roles_share_the_devices_queue(fleet):
    # own: prompt 1-21 and both decodes right behind it, until 43. The lent prompt, launched at 25, runs 43-58.
    world = run_both(fleet, overlaps=True)
    assert world.tokens_ms("own") == [(22, 1), (44, 3)]
    assert world.tokens_ms("lent") == [(62.5, 1), (73.5, 2)]


def test_two_workers_hand_over_to_each_other_at_once(fleet):
    # each computes 1-21 before it comes to granting blocks to the other, which takes until 22; the KV (1 ms, latency
    # 1 ms) is there at 24, sampled 26, decoded until 37
    world = World(fleet(num_prefill=0, num_decode=2), [2, 2])
    a, b = (each.ref for each in world.workers)
    for index, (prefill, decode) in enumerate([(a, b), (b, a)]):
        request = generate(f"r{index}", index, 100, 2, prefill)
        world.tell_at(0.0, index, PrefillRequest(f"r{index}", "", request.request.prompt_token_ids, decode))
        world.tell_at(0.0, 1 - index, request)
    world.clock.run()
    assert world.tokens_ms("r0") == world.tokens_ms("r1") == [(27, 1), (38, 2)]
    assert world.network.num_handovers == 0


def test_two_pools_full_of_prompts_for_each_other_do_not_wait_for_ever(fleet):
    # Each computes a prompt of 13 blocks for the other, has 7 left of 20, and is asked to receive one of 13. A second
    # after that the hand-overs are given up, and both prompts are computed where they are decoded.
    world = World(fleet(num_prefill=0, num_decode=2, num_blocks=20), [2, 2])
    a, b = (each.ref for each in world.workers)
    for index, (prefill, decode) in enumerate([(a, b), (b, a)]):
        request = generate(f"r{index}", index, 200, 2, prefill)
        world.tell_at(0.0, index, PrefillRequest(f"r{index}", "", request.request.prompt_token_ids, decode))
        world.tell_at(0.1, 1 - index, request)
    world.clock.run()
    # asked at 101, given up at 1101, heard of at 1102 by who is idle; the prompt takes 30 ms, a decode 11
    assert world.tokens_ms("r0") == world.tokens_ms("r1") == [(1133, 1), (1144, 2)]
    assert [each.num_requests for each in world.workers] == [0, 0]
    assert world.network.num_handovers == 0


def test_a_prefill_worker_full_of_prompts_that_decode_takes_later_gives_one_up(fleet):
    # P has computed the first prompt, for which D has no block: those are promised to the second, which P has no blocks
    # for. P gives the first one up.
    world = World(fleet(num_blocks=20), [2, 2])
    prefill, decode = (each.ref for each in world.workers)
    first, second = (generate(f"r{index}", index, 200, 2, prefill) for index in range(2))
    for request in (first, second):
        world.tell_at(0.0, 0, PrefillRequest(request.request.request_id, "", request.request.prompt_token_ids, decode))
    for request in (second, first):
        world.tell_at(0.1, 1, request)
    world.clock.run()
    # P hears of the promise at 102, gives up at 1102, computes the second one until 1132: KV 3, sampled 2, decode 11
    assert world.tokens_ms("r1") == [(1138, 1), (1149, 2)]
    assert world.tokens_ms("r0") == [(1179, 1), (1190, 2)]  # computed by D once the second one has left, in 30
    assert [each.num_requests for each in world.workers] == [0, 0]
    assert world.network.num_handovers == 0


def statuses(world: World, index: int) -> list[tuple[float, Status]]:
    ref = world.workers[index].ref
    return [(now, m) for now, sender, m in world.seen if sender == ref and isinstance(m, Status)]


def test_a_role_change_is_told_at_once_and_what_was_accepted_goes_on(fleet):
    world = World(fleet(num_prefill=0, num_decode=1), [20])
    world.tell_at(0.000, 0, generate("r", 0, 100, 20, None))
    world.tell_at(0.030, 0, SetRoles((Role.PREFILL,)))
    world.tell_at(0.050, 0, generate("late", 0, 100, 20, None))
    world.clock.run()
    # read at 32, when the step is over that ran when it came
    assert next(now for now, s in statuses(world, 0) if s.roles == (Role.PREFILL,)) == pytest.approx(0.033)
    assert world.tokens_ms("r")[-1][1] == world.tokens_ms("late")[-1][1] == 20


def test_a_status_comes_when_the_load_changes_but_not_at_every_step(fleet):
    simulation = Simulation(fleet(), gamma_requests(300, 8.0, 1.0, 100, 40))
    counted: dict[str, list[float]] = {each.ref.node_id: [] for each in simulation.workers}
    handle = simulation.gateway.handle

    def count(sender: NodeRef, message: Message) -> None:
        if isinstance(message, Status):
            counted[sender.node_id].append(simulation.clock.now)
        handle(sender, message)

    simulation.network.join(simulation.gateway.ref, count)
    result = simulation.run()
    assert result.num_steps["decode-0"] > 1000
    for times in counted.values():
        assert 50 < len(times) <= 21 * result.virtual_s
    for known in simulation.gateway._membership.workers.values():
        assert known.status is not None
        assert (known.status.num_running, known.status.num_waiting) == (0, 0)  # the last word
        assert known.status.step_cost is not None
        assert known.status.step_cost.num_samples > 50


def test_costs_are_learned_without_tuners(fleet):
    simulation = Simulation(fleet(), gamma_requests(300, 8.0, 1.0, 100, 40))
    assert simulation.run().tuned == []
    prefill, decode = (each.bench.steps.cost for each in simulation.workers)
    assert prefill.base_s + 100 * prefill.per_prompt_token_s == pytest.approx(0.020, rel=0.05)
    assert decode.base_s == pytest.approx(0.010, rel=0.05)
    assert decode.per_decode_s == pytest.approx(0.001, rel=0.1)


def test_statuses_come_as_often_as_in_production():
    assert worker.STATUS_INTERVAL_S == production.STATUS_INTERVAL_S
