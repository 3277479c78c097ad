"""Preemption and urgency in whole workers: the same tokens whoever makes room for whom, and always some progress.

Scheduling faults that other servers shipped, and the tests that would catch them:

    SC01  fits the context and no pool    tests/gateway/test_gateway_bad_input.py (test_prompts_over_the_pool),
                                          tests/worker/test_roles.py (test_a_prompt_larger_than_the_pool...)
    SC04  prompts starve decodes          here, and tests/prefill/test_prefill_urgency.py for prompts among themselves
    SC05  deferred ones are not promoted  here, tests/prefill/test_prefill_urgency.py, tests/worker/test_packing.py
    SC07  not exact after preemption      here
    SC08  resumed to be preempted again   here, tests/sim/test_sim_laws.py
    PD16  running and no tokens           here, tests/sim/test_sim_laws.py
"""

import pytest

from baton.core.messages import Role
from baton.core.queueing import FAIR, FCFS, PRIORITY, SHORTEST
from baton.core.request import Urgency
from baton.decode.role import DecodeRole

PREFILL, DECODE = Role.PREFILL, Role.DECODE
PROMPT = [(7 * i * i + 3) % 101 for i in range(23)]
BATCH, HIGH, LOW = Urgency(is_batch=True), Urgency(0), Urgency(4)


def decode_role(house, ref) -> DecodeRole:
    return house.workers[ref]._roles[DECODE]


def advance(house, seconds: float = 0.01) -> None:
    """Everything arrives, and everybody takes a turn."""
    while house.network.pending:
        house.network.deliver(house.network.pending[0])
    for ref in house.workers:
        house.turn(ref)
    house.now += seconds
    house.beat()


@pytest.mark.parametrize("num_prompt", [19, 20, 21])  # blocks of 4: a border is passed at output 1, 4 and 3
@pytest.mark.parametrize("num_output", [1, 3, 4, 5])
@pytest.mark.parametrize("with_prefill", [True, False])
def test_sc07_resumed_after_any_output_it_goes_on_with_the_same_tokens(
    house, model_oracle, num_prompt, num_output, with_prefill
) -> None:
    """Not doubled, and not taken for a decode behind its prompt (vllm-project/vllm-gaudi PR#524)."""
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    prompts = {"a": [1, *PROMPT[: num_prompt - 1]], "b": PROMPT[:num_prompt]}
    for name, prompt in prompts.items():
        h.generate(name, prompt, 12, d, p if with_prefill else None)
    role = decode_role(h, d)
    while len(h.outputs["b"]) < num_output:
        h.random_step()
    role._collect_all()
    role._scheduler._preempt(role._entries["b"].sequence, role._preempt)
    h.settle()
    assert h.outputs == {name: model_oracle(prompt, 12) for name, prompt in prompts.items()}
    assert h.finished == {"a": "length", "b": "length"}
    assert h.cached == {"a": 0, "b": 0}
    h.assert_idle()


@pytest.mark.parametrize("with_prefill", [True, False])
def test_pd16_sc08_a_tiny_pool_finishes_everything_and_never_stands_still(house, model_oracle, with_prefill) -> None:
    """64 blocks, 4 requests that grow from 10 to 40. Whoever was preempted resumes when all of it fits: few times."""
    h = house(num_blocks=64, token_budget=64)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    prompts = {f"r{i}": [i, *PROMPT, *PROMPT[:16]] for i in range(4)}
    for name, prompt in prompts.items():
        h.generate(name, prompt, 120, d, p if with_prefill else None)
    role, still, num_tokens = decode_role(h, d), 0, 0
    for _ in range(4000):
        advance(h)
        known = sum(map(len, h.outputs.values()))
        still = still + 1 if role.num_running and known == num_tokens else 0
        num_tokens = known
        assert still < 60, "running > 0 and no tokens"
        if len(h.finished) == 4:
            break
    assert h.outputs == {name: model_oracle(prompt, 120) for name, prompt in prompts.items()}
    assert 0 < role.num_preemptions <= 20
    h.settle()
    h.assert_idle()


def test_batch_makes_way_at_once_and_goes_on_where_it_was(house, model_oracle) -> None:
    h = house(num_blocks=40, token_budget=32, max_running=3)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    prompts = {f"b{i}": [i, *PROMPT[:20]] for i in range(3)}
    for name, prompt in prompts.items():
        h.generate(name, prompt, 30, d, p, urgency=BATCH)
    while min(len(h.outputs[name]) for name in prompts) < 5:
        advance(h)
    prompts["interactive"] = [50, *PROMPT, *PROMPT, *PROMPT[:20]]  # neither a place nor blocks for it
    h.generate("interactive", prompts["interactive"], 10, d, p)
    before = sum(len(output) for name, output in h.outputs.items())
    while "interactive" not in h.finished:
        advance(h)
    assert sum(len(output) for name, output in h.outputs.items()) > before + 10, "the others went on beside it"
    preempted = decode_role(h, d).num_preemptions
    assert 1 <= preempted <= 3
    h.settle()
    assert h.outputs == {n: model_oracle(prompt, 10 if n == "interactive" else 30) for n, prompt in prompts.items()}
    assert decode_role(h, d).num_preemptions == preempted, "none is preempted a second time"
    h.assert_idle()


def test_the_lowest_class_moves_under_a_load_of_the_highest_that_never_ends(house, model_oracle) -> None:
    h = house(policy=PRIORITY, num_blocks=64, token_budget=16, max_running=3)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    for i in range(3):
        h.generate(f"h{i}", [i, *PROMPT], 8, d, p, urgency=HIGH)
    h.generate("low", PROMPT, 20, d, p, urgency=LOW)
    count = 3
    for _ in range(300):
        while len(h.outputs) - len(h.finished) < 8:
            h.generate(f"h{count}", [count % 101, *PROMPT], 8, d, p, urgency=HIGH)
            count += 1
        advance(h, 0.5)
        if "low" in h.finished:
            break
    assert h.outputs["low"] == model_oracle(PROMPT, 20)
    assert count > 20
    h.settle()
    h.assert_idle()


def test_the_highest_class_passes_all_that_wait(house) -> None:
    h = house(policy=PRIORITY, max_running=2)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    for i in range(8):
        h.generate(f"low{i}", [i, *PROMPT], 6, d, p, urgency=LOW)
    advance(h)
    h.generate("high", [70, *PROMPT], 6, d, p, urgency=HIGH)
    while "high" not in h.finished:
        advance(h)
    assert len(h.finished) <= 4, "behind the two that ran, and no others"
    h.settle()
    h.assert_idle()


def test_sc04_a_stream_of_prompts_does_not_stop_who_decodes(house, model_oracle) -> None:
    """Prompts and decodes share each step (sgl-project/sglang #32549)."""
    h = house(token_budget=8)
    d = h.birth(DECODE)
    h.generate("running", PROMPT, 40, d, None)
    while not h.outputs["running"]:
        advance(h)
    known = turns = 0
    for i in range(1000):
        h.generate(f"r{i}", [i % 101, i // 101, *PROMPT], 1, d, None)
        advance(h)
        turns = turns + 1 if len(h.outputs["running"]) == known else 0
        known = len(h.outputs["running"])
        assert turns < (30 if h.overlaps else 1), "its gap is one step, with prompts and without"
        if known == 40:
            break
    assert h.outputs["running"] == model_oracle(PROMPT, 40)
    h.settle(rounds=20000)
    h.assert_idle()


def test_sc05_deferred_ones_join_though_a_hog_takes_every_step(house, model_oracle) -> None:
    """Those whose KV is on the way count as running, and go on when it is there (vllm-project/vllm #53130)."""
    h = house(token_budget=8, num_blocks=128)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("hog", [*PROMPT * 10], 1, d, None)
    for i in range(3):
        h.generate(f"r{i}", [i, *PROMPT[:9]], 3, d, p)
    while len(h.finished) < 3:
        advance(h)
    assert "hog" not in h.finished
    h.settle()
    assert h.outputs["hog"] == model_oracle(PROMPT * 10, 1)
    h.assert_idle()


@pytest.mark.parametrize("policy", [FCFS, PRIORITY, FAIR, SHORTEST], ids=["fcfs", "priority", "fair", "shortest"])
@pytest.mark.parametrize("seed", range(6))
def test_any_urgency_under_any_policy_any_abort(house, model_oracle, policy, seed) -> None:
    h = house(seed=seed, policy=policy, num_blocks=32, max_running=4)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    wanted, aborted = {}, set()
    for i in range(20):
        for _ in range(h.random.randrange(12)):
            h.random_step()
        h.now += h.random.random() * 3
        h.beat()
        if h.random.random() < 0.8:
            prompt = [*PROMPT[: h.random.randrange(1, 23)], h.random.randrange(101)]
            wanted[f"r{i}"] = prompt
            urgency = Urgency(h.random.randrange(5), h.random.choice("xyz"), h.random.random() < 0.3)
            h.generate(f"r{i}", prompt, h.random.randrange(1, 40), d, h.random.choice((None, p)), urgency=urgency)
        elif wanted:
            aborted.add(name := h.random.choice(list(wanted)))
            h.abort(name)
    h.settle(rounds=20000)
    for name, prompt in wanted.items():
        assert h.outputs[name] == model_oracle(prompt, len(h.outputs[name])), name
        assert name in h.finished or name in aborted, (name, h.failed)
    h.assert_idle()


def test_a_prompt_that_decode_waits_for_is_not_held_up_by_one_that_waits_for_decode(house, model_oracle) -> None:
    """Prefill's pool holds one of the two prompts. It computed the low one while decode was full; decode's only place
    is then for the high one. Until that, decode is only busy, and nothing is given up.
    """
    h = house(policy=PRIORITY, num_blocks=40, max_running=1)
    p, d = h.birth(PREFILL, num_blocks=8, max_running=4), h.birth(DECODE)
    prompts = {"first": PROMPT[:5], "low": PROMPT, "high": [1, *PROMPT]}
    h.generate("first", prompts["first"], 60, d, None, urgency=HIGH)
    advance(h)
    h.generate("low", prompts["low"], 4, d, p, urgency=LOW)
    for _ in range(10):
        advance(h)
    h.generate("high", prompts["high"], 4, d, p, urgency=HIGH)
    while "first" not in h.finished:
        advance(h, 0.1)
    assert h.benches[d].counters["num_handover_failures"] == 0
    began = h.now
    while len(h.finished) < 3 and h.now < began + 60:
        advance(h, 0.1)
    assert list(h.finished) == ["first", "high", "low"]
    assert h.now - began < 10, "a lease decided"
    assert h.benches[d].counters["num_handover_failures"] == 1
    assert h.outputs == {name: model_oracle(one, len(h.outputs[name])) for name, one in prompts.items()}
    h.settle()
    h.assert_idle()
