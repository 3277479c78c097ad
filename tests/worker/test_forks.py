"""Several choices of one prompt in whole workers: one prompt computed, right tokens each, nothing left, whatever ends.

Faults that other servers shipped, and the tests that would catch them:

    AP14  a choice without a finish, or with two     every test here (House counts), test_any_order_any_abort_any_death
    AP34  n > 1 at temperature 0                     test_greedy_choices_are_equal
    AP37  a field is lost in the copies              test_every_choice_has_all_of_the_request
"""

import pytest
import torch

from baton.core.lifecycle import Phase
from baton.core.messages import AbortRequest, GenerateRequest, Role
from baton.core.queueing import PRIORITY
from baton.core.request import FinishReason, Request, SamplingParams, Urgency

PREFILL, DECODE = Role.PREFILL, Role.DECODE
PROMPT = [(7 * i * i + 3) % 101 for i in range(23)]
SEED = 2026
N = (0, 1, 2, 3)


def computed(house, ref) -> int:
    return house.benches[ref].engine.runner.num_tokens_computed


def num_used(house, ref) -> int:
    """Blocks that somebody needs: not free, and not cache that nobody reads."""
    return house.benches[ref].info.num_blocks - house.benches[ref].cache.num_available


def expected(sampled_oracle, name: str, prompt: list[int], num_tokens: int, choices=N, seed: int = SEED):
    return {
        f"{name}#{choice}" if choice else name: sampled_oracle(prompt, num_tokens, seed, choice) for choice in choices
    }


def decode_role(house, ref):
    return house.workers[ref]._roles[DECODE]


@pytest.mark.parametrize("with_prefill", [True, False])
@pytest.mark.parametrize("num_prompt", [1, 4, 5, 20, 23])
def test_one_prompt_is_computed_for_all_choices(house, sampled_oracle, with_prefill, num_prompt) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    prompt = PROMPT[:num_prompt]
    h.generate("a", prompt, 6, d, p if with_prefill else None, choices=N, temperature=1.0, seed=SEED)
    h.settle()
    assert h.outputs == expected(sampled_oracle, "a", prompt, 6)
    assert len({tuple(output) for output in h.outputs.values()}) == len(N), "choices differ"
    assert h.finished == dict.fromkeys(h.outputs, FinishReason.LENGTH)
    assert h.cached == dict.fromkeys(h.outputs, 0)
    assert computed(h, p) == (num_prompt if with_prefill else 0)
    assert computed(h, d) == (0 if with_prefill else num_prompt) + 5 * len(N)
    held = decode_role(h, d)._pacing._newcomer  # tokens that a choice holds on average: of the prompt its share
    assert held == pytest.approx(num_prompt / len(N) + 6 / 2)
    h.assert_idle()


@pytest.mark.parametrize("with_prefill", [True, False])
def test_blocks_of_the_prompt_are_there_once(house, with_prefill) -> None:
    """23 tokens in blocks of 4: five full ones that all share, and of each choice's own the one with the last three
    tokens, and those for what it generates.
    """
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 30, d, p if with_prefill else None, choices=N, temperature=1.0, seed=SEED)
    while len(h.outputs["a#3"]) < 10:
        h.random_step()
    entries = list(decode_role(h, d)._entries.values())
    assert [entry.sequence.phase for entry in entries] == [Phase.RUNNING] * len(N)
    tables = [entry.sequence.block_table.tolist() for entry in entries]
    shared = set(tables[0][:5])
    assert all(table[:5] == tables[0][:5] for table in tables)
    own = [block_id for table in tables for block_id in table[5:]]
    assert len(own) == len(set(own))
    assert not shared & set(own)
    assert num_used(h, d) == 5 + len(own)
    assert {len(table) for table in tables} <= {8, 9, 10, 11}  # 33 tokens or a few more
    h.settle()
    assert num_used(h, d) == 0
    h.assert_idle()


@pytest.mark.parametrize("with_prefill", [True, False])
def test_greedy_choices_are_equal(house, model_oracle, with_prefill) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 12, d, p if with_prefill else None, choices=(0, 1))
    h.settle()
    assert h.outputs == dict.fromkeys(("a", "a#1"), model_oracle(PROMPT, 12))
    h.assert_idle()


def test_a_choice_is_the_same_alone_and_with_the_others(house, sampled_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("all", PROMPT, 12, d, p, choices=N, temperature=1.0, seed=SEED)
    h.settle()
    h.generate("alone", PROMPT, 12, d, None, choices=(2,), temperature=1.0, seed=SEED)
    h.settle()
    assert h.outputs["alone#2"] == h.outputs["all#2"] == sampled_oracle(PROMPT, 12, SEED, 2)
    h.assert_idle()


@pytest.mark.parametrize("with_prefill", [True, False])
@pytest.mark.parametrize("num_places", [1, 2, 3])
def test_more_choices_than_places_take_turns(house, sampled_oracle, with_prefill, num_places) -> None:
    """One that joins late forks from a sibling that runs, or from what the last one to end has left."""
    h = house(max_running=num_places)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    choices = tuple(range(7))
    h.generate("a", PROMPT, 6, d, p if with_prefill else None, choices=choices, temperature=1.0, seed=SEED)
    most = 0
    while len(h.finished) < len(choices):
        h.random_step()
        most = max(most, decode_role(h, d).num_running)
    assert most == num_places
    h.settle()
    assert h.outputs == expected(sampled_oracle, "a", PROMPT, 6, choices)
    assert h.cached == dict.fromkeys(h.outputs, 0)
    assert computed(h, p) + computed(h, d) == 23 + 5 * len(choices)
    h.assert_idle()


@pytest.mark.parametrize("with_prefill", [True, False])
def test_more_than_the_pool_holds_is_preempted_and_exact(house, sampled_oracle, with_prefill) -> None:
    h = house(num_blocks=24)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    choices = tuple(range(6))
    for number in range(2):
        prompt = [number, *PROMPT]
        h.generate(
            f"r{number}", prompt, 20, d, p if with_prefill else None, choices=choices, temperature=1.0, seed=SEED
        )
    h.settle(rounds=20000)
    wanted = {}
    for number in range(2):
        wanted |= expected(sampled_oracle, f"r{number}", [number, *PROMPT], 20, choices)
    assert h.outputs == wanted
    assert decode_role(h, d).num_preemptions > 0
    h.assert_idle()


@pytest.mark.parametrize("with_prefill", [True, False])
@pytest.mark.parametrize("choice", [0, 1, 3])
@pytest.mark.parametrize("steps", [0, 8, 16, 24, 32, 48])
def test_one_choice_is_aborted_and_the_others_go_on(house, sampled_oracle, with_prefill, choice, steps) -> None:
    """Also the one that leads, while its prompt is on its way."""
    h = house(seed=steps)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 12, d, p if with_prefill else None, choices=N, temperature=1.0, seed=SEED)
    for _ in range(steps):
        h.random_step()
    h.abort("a", choice)
    h.settle()
    wanted = expected(sampled_oracle, "a", PROMPT, 12)
    name = f"a#{choice}" if choice else "a"
    output, whole = h.outputs.pop(name), wanted.pop(name)
    assert output == whole[: len(output)]
    assert h.outputs == wanted
    assert wanted.keys() <= h.finished.keys()
    assert computed(h, p) + computed(h, d) <= 23 + 11 * len(N)
    h.assert_idle()


def test_when_the_lead_is_aborted_early_another_gets_its_prompt(house, sampled_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 5, d, p, choices=N, temperature=1.0, seed=SEED)
    while h.network.queues[(h.gateway, d)]:
        h.network.deliver((h.gateway, d))
    h.turn(d)
    assert decode_role(h, d).num_requests == len(N)
    for choice in (0, 1, 2):
        h.network.send(h.gateway, d, AbortRequest("a", "not wanted any more", choice))
    h.settle()
    assert h.outputs["a#3"] == sampled_oracle(PROMPT, 5, SEED, 3)
    assert [name for name, output in h.outputs.items() if output] == ["a#3"]
    assert h.finished == {"a#3": "length"}
    assert computed(h, p) == 23
    h.assert_idle()


@pytest.mark.parametrize("steps", [1, 5, 10, 20, 40, 80])
def test_when_all_are_aborted_nothing_is_left(house, steps) -> None:
    h = house(seed=steps)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT * 2, 30, d, p, choices=N)
    for _ in range(steps):
        h.random_step()
    h.abort("a")
    h.settle()
    h.assert_idle()


@pytest.mark.parametrize("steps", [1, 5, 10, 20, 40, 80])
def test_when_prefill_dies_decode_computes_the_rest_once(house, sampled_oracle, steps) -> None:
    h = house(seed=steps)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT * 3, 6, d, p, choices=N, temperature=1.0, seed=SEED)
    for _ in range(steps):
        h.random_step()
    h.kill(p)
    h.settle()
    assert h.outputs == expected(sampled_oracle, "a", PROMPT * 3, 6)
    assert computed(h, d) <= 69 + 5 * len(N)
    h.assert_idle()


@pytest.mark.parametrize("steps", [1, 10, 20, 40])
def test_a_gateway_that_is_lost_leaves_nothing(house, steps) -> None:
    h = house(seed=steps)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 30, d, p, choices=N)
    for _ in range(steps):
        h.random_step()
    role = decode_role(h, d)
    had = "a" in role._forks
    role.gateway_lost(h.gateway)
    assert role.num_requests == 0
    h.abort("a")
    h.settle()
    assert ("a" in h.failed) is had
    h.assert_idle()


def test_each_choice_goes_on_alone_after_its_worker_died(house, sampled_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 20, d, p, choices=N, temperature=1.0, seed=SEED)
    while not all(h.outputs.values()):
        h.random_step()
    h.kill(d)
    h.read()
    other = h.birth(DECODE, number=1)
    for choice in N:
        name = f"retry of {choice}"
        key = f"{name}#{choice}" if choice else name
        h.outputs[key] = h.outputs.pop(f"a#{choice}" if choice else "a")
        h.generate(name, PROMPT, 20, other, p, choices=(choice,), temperature=1.0, seed=SEED)
    h.settle()
    for choice in N:
        key = f"retry of {choice}#{choice}" if choice else "retry of 0"
        assert h.outputs[key] == sampled_oracle(PROMPT, 20, SEED, choice)
    h.assert_idle()


def test_logits_that_are_not_finite_end_the_request_once(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    sampler = h.benches[d].engine.sampler
    sample = sampler.sample
    [broken] = model_oracle(PROMPT, 1)
    sampler.sample = lambda x, rows: sample(torch.where(x[:, broken, None] == 1.0, torch.nan, x), rows)
    h.generate("a", PROMPT, 6, d, p, choices=N)
    h.settle()
    assert "not finite" in h.failed["a"]
    assert not any(h.outputs.values())
    h.assert_idle()


@pytest.mark.parametrize(
    ("choices", "output", "max_tokens"), [((), [], 1), ((0, 0), [], 1), ((0, 1), [5], 2), ((0, 1), [], 0)]
)
def test_choices_that_make_no_sense_are_refused(house, choices, output, max_tokens) -> None:
    h = house()
    d = h.birth(DECODE)
    request = Request("a", "n", PROMPT, SamplingParams(max_tokens=max_tokens), output, choices=choices)
    h.network.send(h.gateway, d, GenerateRequest(request, None))
    h.settle()
    assert "choices must" in h.failed["a"]
    h.assert_idle()


def test_every_choice_has_all_of_the_request(house) -> None:
    """What each choice is sampled by is the client's request, with nothing of it lost but the number of the choice."""
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    wanted = SamplingParams(
        temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, seed=7, max_tokens=5, min_tokens=2, stop_token_ids=(100, 99)
    )
    seen = []
    sampler = h.benches[d].engine.sampler
    launch = sampler.launch

    def spy(logits, rows, *rest):
        seen.extend(rows)
        return launch(logits, rows, *rest)

    sampler.launch = spy
    fields = {name: getattr(wanted, name) for name in wanted.__struct_fields__ if name != "max_tokens"}
    h.generate("a", PROMPT, 5, d, p, choices=N, **fields)
    h.settle()
    assert {row.choice for row in seen} == set(N)
    assert all(row.params == wanted for row in seen)
    h.assert_idle()


def test_what_is_kept_for_forks_makes_way_for_whoever_needs_blocks(house, sampled_oracle) -> None:
    """One place, and a pool of two requests: what the first choice left is in the way of a more urgent newcomer."""
    h = house(max_running=1, num_blocks=12, policy=PRIORITY)
    d = h.birth(DECODE)
    h.generate("a", PROMPT, 3, d, None, choices=(0, 1), temperature=1.0, seed=SEED)
    while "a" not in h.finished:
        h.random_step()
    other = [99 - i for i in range(40)]
    h.generate("b", other, 3, d, None, urgency=Urgency(0), temperature=1.0, seed=SEED)
    h.settle()
    assert h.outputs["b"] == sampled_oracle(other, 3, SEED, 0)
    assert h.outputs["a#1"] == sampled_oracle(PROMPT, 3, SEED, 1)
    h.assert_idle()


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 40))])
def test_any_order_any_abort_any_death(house, sampled_oracle, seed) -> None:
    h = house(seed=seed, num_blocks=40, max_running=5)
    refs = {name: h.birth(role, number=i) for name, role, i in (
        ("p0", PREFILL, 0), ("p1", PREFILL, 1), ("d0", DECODE, 0), ("d1", DECODE, 1)
    )}  # fmt: skip
    wanted: dict[str, tuple[list[int], int, str]] = {}  # output |-> prompt, choice, decode worker
    lost: set[str] = set()
    for i in range(16):
        for _ in range(h.random.randrange(25)):
            h.random_step()
        what = h.random.random()
        if what < 0.7:
            prompt = PROMPT[: h.random.randrange(1, 20)] + [h.random.randrange(101) for _ in range(3)]
            d, p = h.random.choice(("d0", "d1")), h.random.choice((None, "p0", "p1"))
            choices = tuple(h.random.sample(range(9), h.random.randrange(1, 8)))
            names = {f"r{i}#{choice}" if choice else f"r{i}": choice for choice in choices}
            wanted |= {name: (prompt, choice, d) for name, choice in names.items()}
            returned = h.random.choice((0, 4, 8, 16)) if p else 0
            num_tokens = h.random.randrange(1, 20)
            h.generate(
                f"r{i}", prompt, num_tokens, refs[d], refs[p] if p else None, returned,
                choices=choices, temperature=1.0, seed=SEED,
            )  # fmt: skip
        elif what < 0.9 and wanted:
            name = h.random.choice(list(wanted))
            request = name.split("#")[0]
            if h.random.random() < 0.7:
                lost.add(name)
                h.abort(request, wanted[name][1])
            else:
                lost |= {other for other in wanted if other.split("#")[0] == request}
                h.abort(request)
        elif what > 0.93:
            dead = h.random.choice(("p0", "p1", "d0"))
            h.kill(refs[dead])
            lost |= {name for name, (_, _, d) in wanted.items() if d == dead}
            refs[dead] = h.birth(PREFILL if dead[0] == "p" else DECODE, number=int(dead[1]))
    h.settle(rounds=20000)
    for name, (prompt, choice, _) in wanted.items():
        output = h.outputs[name]
        assert output == sampled_oracle(prompt, len(output), SEED, choice), name
        assert name in h.finished or name in lost, (name, h.failed)
    h.assert_idle()


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("num_prompt", range(20, 24))
def test_steps_in_flight_of_one_that_has_ended_leave_what_it_kept_as_it_is(
    house, sampled_oracle, block_size, num_prompt
) -> None:
    """They would fill the kept blocks up with tokens that nobody has, when those blocks are given up."""
    h = house(max_running=1, block_size=block_size, num_blocks=256 // block_size, policy=PRIORITY)
    d = h.birth(DECODE)
    device, role = h.benches[d].engine.runner.device, decode_role(h, d)
    prompt = PROMPT[:num_prompt]
    h.generate("a", prompt, 9, d, None, choices=(0, 1), temperature=1.0, seed=SEED)
    while not h.outputs["a"]:
        h.random_step()
    device.holds = h.overlaps
    while h.overlaps and len(role._in_flight) < 2:
        h.random_step()
    h.abort("a", 0)
    while role._forks.entry("a", 0):
        h.random_step()
    other = [99 - i for i in range(num_prompt)]
    h.generate("b", other, 9, d, None, urgency=Urgency(0), temperature=1.0, seed=SEED)
    device.holds = False
    h.settle()
    assert h.outputs["a#1"] == sampled_oracle(prompt, 9, SEED, 1)
    assert h.outputs["b"] == sampled_oracle(other, 9, SEED, 0)
    h.generate("c", [*prompt, *h.outputs["a#1"]], 3, d, None, temperature=1.0, seed=SEED)
    h.settle()
    assert h.outputs["c"] == sampled_oracle([*prompt, *h.outputs["a#1"]], 3, SEED, 0)
    h.assert_idle()
