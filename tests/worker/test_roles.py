"""Prefill and decode roles together, in one thread: right tokens, true counts, nothing left, whatever happens when."""

import pytest
import torch

from baton.core.messages import PeerJoined, PeerLeft, Role

PREFILL, DECODE = Role.PREFILL, Role.DECODE
PROMPT = [(7 * i * i + 3) % 101 for i in range(23)]


def computed(house, ref) -> int:
    return house.benches[ref].engine.runner.num_tokens_computed


def test_a_prompt_is_computed_on_prefill_and_generated_on_decode(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 6, d, p)
    h.settle()
    assert h.outputs["a"] == model_oracle(PROMPT, 6)
    assert h.finished == {"a": "length"}
    assert computed(h, p) == 23
    assert computed(h, d) == 5, "the first token needs no forward pass on decode"
    assert h.cached["a"] == 0
    h.assert_idle()


@pytest.mark.parametrize("block_sizes", [(4, 4), (1, 16), (16, 2), (8, 128)])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 16, 17])
def test_block_sizes_of_the_two_sides_may_differ(house, model_oracle, block_sizes, num_tokens) -> None:
    h = house()
    p, d = h.birth(PREFILL, block_size=block_sizes[0]), h.birth(DECODE, block_size=block_sizes[1])
    for name in "ab":
        h.generate(name, PROMPT[:num_tokens], 5, d, p)
        h.settle()
    assert h.outputs == dict.fromkeys("ab", model_oracle(PROMPT[:num_tokens], 5))
    h.assert_idle()


def test_without_a_prefill_worker_decode_computes_the_prompt(house, model_oracle) -> None:
    h = house()
    d = h.birth(DECODE)
    h.generate("a", PROMPT, 6, d, None)
    h.settle()
    assert h.outputs["a"] == model_oracle(PROMPT, 6)
    assert computed(h, d) == 23 + 5
    h.assert_idle()


def test_only_tokens_that_decode_lacks_are_sent(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 3, d, p)
    h.settle()
    sent = h.benches[p].link.counts().bytes_sent
    longer = [*PROMPT, 5, 6, 7]
    h.generate("b", longer, 3, d, p)
    h.settle()
    assert h.outputs["b"] == model_oracle(longer, 3)
    bytes_per_token = 2 * 4
    assert h.benches[p].link.counts().bytes_sent - sent == (26 - 20) * bytes_per_token
    assert h.cached["b"] == 20
    h.assert_idle()


def test_the_second_turn_is_computed_where_the_answer_lies(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 10, d, p)
    h.settle()
    turn_2 = PROMPT + h.outputs["a"] + [1, 2, 3]
    before = computed(h, d)
    h.generate("b", turn_2, 1, d, None)
    h.settle()
    assert h.outputs["b"] == model_oracle(turn_2, 1)
    assert computed(h, d) - before <= 3 + 4
    h.assert_idle()


def test_a_long_second_turn_gets_the_answers_kv_back_and_computes_only_what_is_new(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 10, d, p)
    h.settle()
    turn_2 = PROMPT + h.outputs["a"] + [(5 * i) % 101 for i in range(30)]
    before = computed(h, p), computed(h, d)
    h.generate("b", turn_2, 3, d, p, returned=32)
    h.settle()
    assert h.outputs["b"] == model_oracle(turn_2, 3)
    assert (computed(h, p) - before[0], computed(h, d) - before[1]) == (63 - 32, 2)
    assert h.cached["b"] == 32
    h.assert_idle()


def test_a_returned_prefix_that_is_gone_is_computed_after_all(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("b", PROMPT, 3, d, p, returned=16)
    h.settle()
    assert h.outputs["b"] == model_oracle(PROMPT, 3)
    assert computed(h, p) == 23
    assert h.cached["b"] == 0
    h.assert_idle()


def test_a_step_in_flight_for_a_dead_request_does_not_write_into_what_others_receive(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL, num_blocks=8), h.birth(DECODE)
    h.generate("c", PROMPT[:16], 2, d, None)
    h.settle()
    turn_2 = PROMPT[:16] + h.outputs["c"]
    device = h.benches[p].engine.runner.device
    device.holds = True
    h.generate("a", [100 - i for i in range(24)], 2, d, p)
    for _ in range(200):
        h.random_step()
    h.abort("a")
    h.generate("b", turn_2, 3, d, p, returned=16)
    for _ in range(400):
        h.random_step()
    device.holds = False
    h.settle()
    assert h.outputs["b"] == model_oracle(turn_2, 3)
    h.assert_idle()


def test_a_hand_over_needs_no_step_of_decode_to_end(house, model_oracle) -> None:
    """It has more pieces than the ring has slots: decode takes them in and gives slots back while its steps run."""
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT[:5], 40, d, None)
    while len(h.outputs["a"]) < 3:
        h.random_step()
    device, link = h.benches[d].engine.runner.device, h.benches[d].link
    device.holds = True
    h.generate("b", PROMPT, 3, d, p)
    for _ in range(600):
        h.random_step()
    assert link.counts().receivers == h.workers[p].num_requests == 0
    if h.overlaps:
        assert not h.finished
        assert 2 <= len(device.queue) <= 8  # nobody waited for any of it
    device.holds = False
    h.settle()
    assert (h.outputs["a"], h.outputs["b"]) == (model_oracle(PROMPT[:5], 40), model_oracle(PROMPT, 3))
    h.assert_idle()


def test_a_returned_prefix_that_prefill_does_not_want_ends_with_the_hand_over(house, model_oracle) -> None:
    """Prefill cached it after the gateway looked: it never asks for it, and decode must not offer it for ever."""
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 3, d, p)
    h.settle()
    h.generate("b", PROMPT, 30, d, p, returned=16)
    while not h.outputs["b"]:
        h.random_step()
    assert h.benches[d].link.counts().senders == 0
    h.settle()
    assert h.outputs["b"] == model_oracle(PROMPT, 30)
    h.assert_idle()


def test_a_decode_worker_that_was_missed_for_a_while_costs_no_lease(house, model_oracle) -> None:
    """Prefill dropped the ring when it was told that decode left; decode, which never left, still grants it."""
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 3, d, p)
    h.settle()
    h.network.send(h.gateway, p, PeerLeft(d))
    h.network.send(h.gateway, p, PeerJoined(h.benches[d].info))
    h.settle()
    began = h.now
    for name, prompt in (("b", [1, *PROMPT]), ("c", [2, *PROMPT])):
        before = computed(h, d)
        h.generate(name, prompt, 3, d, p)
        h.settle()
        assert h.outputs[name] == model_oracle(prompt, 3)
    assert computed(h, d) - before == 2, "the second one is handed over again"
    assert h.now - began < 5.0
    h.assert_idle()


def test_a_hidden_state_of_another_size_costs_one_token_and_no_worker(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    link = h.benches[p].link
    finish = link.finish
    link.finish = lambda request_id, hidden, *rest: finish(request_id, hidden[:-1], *rest)
    h.generate("a", PROMPT, 6, d, p)
    h.settle()
    assert h.outputs["a"] == model_oracle(PROMPT, 6)
    assert computed(h, d) == 1 + 5
    h.assert_idle()


def test_logits_that_are_not_finite_end_their_request_and_no_other(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    sampler = h.benches[d].engine.sampler
    sample = sampler.sample
    [broken] = model_oracle(PROMPT, 1)
    other = [1, 2, 3]
    assert broken not in model_oracle(other, 6)
    sampler.sample = lambda x, rows: sample(torch.where(x[:, broken, None] == 1.0, torch.nan, x), rows)
    h.generate("a", PROMPT, 6, d, p)
    h.generate("b", other, 6, d, p)
    h.settle()
    assert "not finite" in h.failed["a"]
    assert (h.outputs["a"], h.outputs["b"]) == ([], model_oracle(other, 6))
    h.assert_idle()


@pytest.mark.parametrize("with_prefill", [True, False])
def test_a_prefix_that_many_ask_for_at_once_is_computed_once(house, model_oracle, with_prefill) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    prompts = {f"r{i}": [*PROMPT[:20], i, 2 * i] for i in range(6)}
    prompts |= {"same": [*PROMPT[:20], 0, 0], "other": [99, *PROMPT]}
    for name, prompt in prompts.items():
        h.generate(name, prompt, 2, d, p if with_prefill else None)
    h.settle()
    assert h.outputs == {name: model_oracle(prompt, 2) for name, prompt in prompts.items()}
    num_generated_by_steps = 0 if with_prefill else len(prompts)
    assert computed(h, p if with_prefill else d) == 20 + 7 * 2 + 24 + num_generated_by_steps
    h.assert_idle()


def test_a_stop_token_as_the_first_one_costs_no_decode_step_but_one_that_was_under_way(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    [first] = model_oracle(PROMPT, 1)
    h.generate("a", PROMPT, 50, d, p, stop_token_ids=(first,))
    h.settle()
    assert (h.outputs["a"], h.finished["a"]) == ([first], "stop")
    assert computed(h, d) <= (1 if h.overlaps else 0)
    h.assert_idle()


def test_a_stream_resumed_elsewhere_goes_on_with_the_same_tokens(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 20, d, p)
    while len(h.outputs["a"]) < 7:
        h.random_step()
    h.kill(d)
    h.read()
    other = h.birth(DECODE, number=1)
    h.generate("a", PROMPT, 20, other, p)
    h.settle()
    assert h.outputs["a"] == model_oracle(PROMPT, 20)
    h.assert_idle()


@pytest.mark.parametrize("steps", [1, 5, 10, 20, 40, 80])
def test_when_prefill_dies_decode_computes_the_rest(house, model_oracle, steps) -> None:
    h = house(seed=steps)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT * 4, 6, d, p)
    for _ in range(steps):
        h.random_step()
    h.kill(p)
    h.settle()
    assert h.outputs["a"] == model_oracle(PROMPT * 4, 6)
    h.assert_idle()


def test_when_decode_dies_prefill_gives_everything_back(house) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT * 3, 6, d, p)
    for _ in range(12):
        h.random_step()
    h.kill(d)
    h.settle()
    h.assert_idle()


def test_a_hand_over_that_never_comes_ends_in_local_computation(house, model_oracle) -> None:
    """The prefill worker is alive for the gateway but its messages are lost: the lease decides."""
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.settle()
    h.generate("a", PROMPT, 6, d, p)
    h.network.queues[(h.gateway, p)].clear()
    h.settle()
    assert h.outputs["a"] == model_oracle(PROMPT, 6)
    h.assert_idle()


def test_a_step_longer_than_the_lease_does_not_end_hand_overs_whose_messages_lie_unread(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("long", PROMPT[:5], 30, d, None)
    while not h.outputs["long"]:
        h.random_step()
    prompt = PROMPT[:12]
    h.generate("a", prompt, 6, d, p)
    while h.network.queues[(h.gateway, p)]:
        h.network.deliver((h.gateway, p))
    h.turn(p)
    while not h.benches[d].link.counts().receivers:
        h.random_step()
    while h.workers[p].num_requests:  # all of it is on its way to decode, which reads none of it
        for pair in [pair for pair in h.network.pending if pair[1] == p]:
            h.network.deliver(pair)
        h.turn(p)
    runner = h.benches[d].engine.runner
    forward = runner.forward

    def slow_forward(batch):
        runner.forward = forward
        h.now += 45.0
        h.beat()
        return forward(batch)

    runner.forward = slow_forward
    h.turn(d)
    h.settle()
    assert h.outputs["a"] == model_oracle(prompt, 6)
    assert h.benches[d].counters["num_handover_failures"] == 0
    h.assert_idle()


def test_more_than_the_pool_holds_is_preempted_and_exact(house, model_oracle) -> None:
    h = house(num_blocks=24)
    p, d = h.birth(PREFILL), h.birth(DECODE)
    prompts = {f"r{i}": [i, *PROMPT[: 9 + i]] for i in range(6)}
    for name, prompt in prompts.items():
        h.generate(name, prompt, 40, d, p)
    h.settle(rounds=20000)
    assert h.outputs == {name: model_oracle(prompt, 40) for name, prompt in prompts.items()}
    assert h.workers[d]._roles[DECODE].num_preemptions > 0
    h.assert_idle()


def test_a_prompt_larger_than_the_pool_is_refused_at_once(house) -> None:
    h = house(num_blocks=4)
    d = h.birth(DECODE)
    h.generate("a", PROMPT, 6, d, None)
    h.settle()
    assert "holds 16" in h.failed["a"]
    h.assert_idle()


def test_a_second_request_with_the_same_id_is_refused_and_the_first_goes_on(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 6, d, p)
    h.generate("a", PROMPT[:5], 6, d, p)
    h.settle()
    assert "already here" in h.failed["a"]
    assert h.outputs["a"] == model_oracle(PROMPT, 6)
    h.assert_idle()


@pytest.mark.parametrize("seed", range(60))
def test_any_order_any_abort_any_death(house, model_oracle, seed) -> None:
    """Random lives: shared prefixes, aborts, dying workers, messages in any order across senders."""
    h = house(seed=seed, num_blocks=40)
    refs = {name: h.birth(role, number=i) for name, role, i in (
        ("p0", PREFILL, 0), ("p1", PREFILL, 1), ("d0", DECODE, 0), ("d1", DECODE, 1)
    )}  # fmt: skip
    wanted: dict[str, tuple[list[int], str]] = {}
    aborted: set[str] = set()
    for i in range(24):
        for _ in range(h.random.randrange(25)):
            h.random_step()
        what = h.random.random()
        if what < 0.75:
            prompt = PROMPT[: h.random.randrange(1, 20)] + [
                h.random.randrange(101) for _ in range(h.random.randrange(6))
            ]
            d = h.random.choice(("d0", "d1"))
            p = h.random.choice((None, "p0", "p1"))
            wanted[f"r{i}"] = (prompt, d)
            returned = h.random.choice((0, 4, 8, 16)) if p else 0
            h.generate(f"r{i}", prompt, h.random.randrange(1, 25), refs[d], refs[p] if p else None, returned)
        elif what < 0.9 and wanted:
            name = h.random.choice(list(wanted))
            aborted.add(name)
            h.abort(name)
        elif what > 0.93:
            dead = h.random.choice(("p0", "p1", "d0"))
            h.kill(refs[dead])
            aborted |= {name for name, (_, d) in wanted.items() if d == dead}
            refs[dead] = h.birth(PREFILL if dead[0] == "p" else DECODE, number=int(dead[1]))
    h.settle(rounds=20000)
    for name, (prompt, _) in wanted.items():
        output = h.outputs[name]
        assert output == model_oracle(prompt, len(output)), name
        assert name in h.finished or name in aborted, (name, h.failed)
    h.assert_idle()
