"""Workers with both roles at once: hand-overs in both directions, masks that change under load, shared steps."""

import pytest

from baton.core.messages import Role, SetRoles, Status

PREFILL, DECODE = Role.PREFILL, Role.DECODE
PROMPT = [(7 * i * i + 3) % 101 for i in range(23)]


def computed(house, ref) -> int:
    return house.benches[ref].engine.runner.num_tokens_computed


def last_status(house, ref) -> Status:
    return house.workers[ref]._last_status


def set_roles(house, ref, *roles: Role) -> None:
    house.network.send(house.gateway, ref, SetRoles(roles))


def test_the_mask_is_reported_and_changes_and_is_never_empty(house) -> None:
    h = house()
    p = h.birth(PREFILL)
    h.settle()
    assert last_status(h, p).roles == (PREFILL,)
    assert set(last_status(h, p).settings) == {"token budget", "chunk size"}
    set_roles(h, p, DECODE, PREFILL)
    h.settle()
    assert last_status(h, p).roles == (PREFILL, DECODE)
    assert set(last_status(h, p).settings) == {"token budget", "chunk size", "cap", "decode token budget"}
    set_roles(h, p)
    h.settle()
    assert last_status(h, p).roles == (PREFILL, DECODE)
    set_roles(h, p, DECODE)
    h.settle()
    assert last_status(h, p).roles == (DECODE,)
    assert set(last_status(h, p).settings) == {"token budget", "cap"}


def test_a_change_is_answered_even_when_nothing_changes(house) -> None:
    h = house()
    p = h.birth(PREFILL)
    h.settle()
    said = []
    channels = h.benches[p].channels
    broadcast = channels.broadcast_gateways
    channels.broadcast_gateways = lambda body: (said.append(body), broadcast(body))
    set_roles(h, p, PREFILL)
    h.settle()
    assert [m.roles for m in said if isinstance(m, Status)] == [(PREFILL,)]


def test_what_was_sent_before_the_mask_changed_is_served(house, model_oracle) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.settle()
    h.generate("a", PROMPT, 9, d, p)
    while not h.outputs["a"]:
        h.random_step()
    h.generate("b", [5, *PROMPT], 9, d, p)
    set_roles(h, p, DECODE)
    set_roles(h, d, PREFILL)
    h.generate("late", [6, *PROMPT], 9, d, p)  # by a gateway that does not know yet
    h.generate("swapped", [7, *PROMPT], 9, p, d)
    h.settle()
    assert h.outputs == {
        name: model_oracle(prompt, 9)
        for name, prompt in (
            ("a", PROMPT),
            ("b", [5, *PROMPT]),
            ("late", [6, *PROMPT]),
            ("swapped", [7, *PROMPT]),
        )
    }
    assert not h.failed
    h.assert_idle()


def test_two_workers_hand_over_to_each_other_at_once(house, model_oracle) -> None:
    h = house()
    a, b = h.birth(PREFILL), h.birth(DECODE)
    prompts = {f"r{i}": [i, *PROMPT] for i in range(12)}
    for i, (name, prompt) in enumerate(prompts.items()):
        decode, prefill = (a, b) if i % 2 else (b, a)
        h.generate(name, prompt, 6, decode, prefill)
    both_ways = False
    for _ in range(20000):
        h.random_step()
        links = [h.benches[ref].link.counts() for ref in (a, b)]
        both_ways |= all(link.senders and link.receivers for link in links)
        if len(h.finished) == len(prompts):
            break
    h.settle()
    assert both_ways
    assert h.outputs == {name: model_oracle(prompt, 6) for name, prompt in prompts.items()}
    assert sum(h.benches[ref].counters["num_handover_failures"] for ref in (a, b)) == 0
    assert (computed(h, a), computed(h, b)) == (6 * 24 + 6 * 5, 6 * 24 + 6 * 5)
    h.assert_idle()


def test_what_one_role_has_cached_the_other_uses(house, model_oracle) -> None:
    h = house()
    a, b = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 4, b, a)
    h.settle()
    before = computed(h, a)
    h.generate("b", [*PROMPT[:20], 1, 2, 3], 1, a, None)  # its prompt lies where it was computed
    h.settle()
    assert h.outputs["b"] == model_oracle([*PROMPT[:20], 1, 2, 3], 1)
    assert computed(h, a) - before == 3
    h.assert_idle()


def test_a_prefill_step_beside_decodes_is_as_short_as_the_decode_side_says(house, model_oracle) -> None:
    h = house(token_budget=32, num_blocks=256)
    a, b = h.birth(PREFILL), h.birth(DECODE)
    h.workers[a]._roles[DECODE]._scheduler.prompt_budget = 6
    h.generate("running", PROMPT[:5], 60, a, None)
    while len(h.outputs["running"]) < 3:
        h.random_step()
    runner = h.benches[a].engine.runner
    forward, sizes = runner.forward, []

    def watched(batch):
        sizes.append(batch.num_tokens)
        return forward(batch)

    runner.forward = watched
    h.generate("long", PROMPT * 4, 2, b, a)
    while len(h.finished) < 1:
        h.random_step()
    assert max(sizes) <= 6, sizes
    assert h.outputs["running"] == model_oracle(PROMPT[:5], len(h.outputs["running"]))
    sizes.clear()
    h.settle()
    h.generate("alone", [1, *PROMPT * 3], 2, b, a)
    h.settle()
    assert max(sizes) == 32
    assert h.outputs["alone"] == model_oracle([1, *PROMPT * 3], 2)
    h.assert_idle()


@pytest.mark.parametrize(("num_tokens", "num_given_up"), [(24, 0), (36, 12)])
@pytest.mark.parametrize("seed", range(3))
def test_two_workers_with_full_pools_do_not_wait_for_each_other(
    house, model_oracle, seed, num_tokens, num_given_up
) -> None:
    """Each could fill its pool with prompts for the other one, and have no block for what it decodes itself.

    Prompts hold at most half of 16 blocks; those that are longer than that are given up, and computed where they run.
    """
    h = house(seed=seed, num_blocks=16)
    a, b = h.birth(PREFILL), h.birth(DECODE)
    for ref in (a, b):
        set_roles(h, ref, PREFILL, DECODE)
    h.settle()
    prompts = {f"r{i}": [i, *(PROMPT * 2)[: num_tokens - 1]] for i in range(12)}
    for i, (name, prompt) in enumerate(prompts.items()):
        decode, prefill = (a, b) if i % 2 else (b, a)
        h.generate(name, prompt, 6, decode, prefill)
    began = h.now
    h.settle(rounds=20000)
    assert h.outputs == {name: model_oracle(prompt, 6) for name, prompt in prompts.items()}
    num_failures = sum(h.benches[ref].counters["num_handover_failures"] for ref in (a, b))
    assert num_failures <= num_given_up, num_failures
    assert h.now - began < 30.0, "a lease decided"
    h.assert_idle()


@pytest.mark.parametrize("seed", range(40))
def test_any_order_any_abort_any_death_any_change_of_roles(house, model_oracle, seed) -> None:
    """As tests/worker/test_roles.py, with workers that do both and masks that change meanwhile."""
    h = house(seed=seed, num_blocks=40)
    refs = {f"w{i}": h.birth(PREFILL if i % 2 else DECODE, number=i) for i in range(3)}
    wanted: dict[str, tuple[list[int], str]] = {}
    aborted: set[str] = set()
    for i in range(24):
        for _ in range(h.random.randrange(25)):
            h.random_step()
        what = h.random.random()
        if what < 0.7:
            prompt = PROMPT[: h.random.randrange(1, 20)] + [
                h.random.randrange(101) for _ in range(h.random.randrange(6))
            ]
            d, p = h.random.sample(sorted(refs), 2)
            p = h.random.choice((p, p, None))
            wanted[f"r{i}"] = (prompt, d)
            returned = h.random.choice((0, 4, 8, 16)) if p else 0
            h.generate(f"r{i}", prompt, h.random.randrange(1, 25), refs[d], refs[p] if p else None, returned)
        elif what < 0.8 and wanted:
            name = h.random.choice(list(wanted))
            aborted.add(name)
            h.abort(name)
        elif what < 0.95:
            roles = h.random.choice(((PREFILL,), (DECODE,), (PREFILL, DECODE)))
            set_roles(h, refs[h.random.choice(sorted(refs))], *roles)
        else:
            dead = h.random.choice(sorted(refs))
            h.kill(refs[dead])
            aborted |= {name for name, (_, d) in wanted.items() if d == dead}
            refs[dead] = h.birth(h.random.choice((PREFILL, DECODE)), number=int(dead[1]))
    h.settle(rounds=20000)
    for name, (prompt, _) in wanted.items():
        output = h.outputs[name]
        assert output == model_oracle(prompt, len(output)), name
        assert name in h.finished or name in aborted, (name, h.failed)
    h.assert_idle()
