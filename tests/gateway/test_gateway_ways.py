"""Ways by predicted time, by hand and against a naive search. A step costs 10 ms, a prompt token 0.1 ms, a decode 1 ms;
a prefill worker takes 1000 prompt tokens a step, a decode worker 200."""

import time
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.messages import NodeRef
from baton.core.step_cost import StepCost
from baton.gateway.forecast import Speed
from baton.gateway.loads import SEQUENCE_WEIGHT
from baton.gateway.router import Route, Router
from baton.gateway.ways import HARM, Candidate, Measured

D0, D1, P0, P1 = (NodeRef(name, 1) for name in ("decode-0", "decode-1", "prefill-0", "prefill-1"))
SPEED = Speed(StepCost(0.01, 1e-4, 0.0, 1e-3, 0.0), token_budget=1000, chunk_size=1000, prompt_budget=200)
STANDING_S = SEQUENCE_WEIGHT * 1e-4


def at(ref: NodeRef, cached: int = 0, speed: Speed | None = SPEED) -> Candidate:
    return Candidate(ref, cached, speed)


def decoding(router: Router, ref: NodeRef, count: int) -> None:
    """So many sequences have their first token there."""
    for _ in range(count):
        route = Route(ref, None, 1, 0, num_tokens=1)
        router.dispatched(route, 0.0)
        router.prompt_done(route, 0.0)


def with_backlog(ref: NodeRef, num_tokens: int, at_s: float = 0.0) -> Router:
    router = Router()
    router.dispatched(Route(NodeRef("elsewhere", 1), ref, num_tokens, num_tokens, num_tokens=num_tokens), at_s)
    return router


def test_an_idle_prefill_worker_takes_a_long_prompt() -> None:
    route = Router().choose(2000, [at(D0)], [at(P0)], 5.0)
    assert (route.way, route.prefill, route.chosen_at, route.wait_s) == ("remote", P0, 5.0, 0.0)
    assert route.ttft_s == pytest.approx(2 * 0.01 + 0.2)
    assert route.lag_s == 0.0


def test_a_decode_worker_with_sequences_gives_the_first_token_half_a_step_later() -> None:
    router = Router()
    decoding(router, D0, 8)
    route = router.choose(2000, [at(D0)], [at(P0)], 0.0)
    assert route.ttft_s == pytest.approx(0.22 + 0.009)
    assert route.lag_s == pytest.approx(0.009)


def test_a_prefill_worker_with_a_long_backlog_sends_short_prompts_local() -> None:
    router = with_backlog(P0, 5000)  # 0.55 s
    decoding(router, D0, 8)
    route = router.choose(100, [at(D0)], [at(P0)], 0.1)
    assert route.is_local
    assert route.wait_s == pytest.approx(0.009)
    assert route.ttft_s == pytest.approx(0.009 + 0.018 + 0.01)
    # remote: 0.45 + 0.02 + 0.009; local: 0.037 and a quarter of 9 * 10 ms
    assert router.choose(100, [at(D0)], [at(P0)], 0.545).prefill == P0, "it is nearly free"


def test_a_decode_worker_full_of_sequences_does_not_take_a_long_prompt() -> None:
    router = with_backlog(P0, 10_000)  # 1.1 s
    decoding(router, D0, 64)
    route = router.choose(2000, [at(D0)], [at(P0)], 0.0)
    assert route.prefill == P0
    assert route.wait_s == pytest.approx(1.1)
    assert route.ttft_s == pytest.approx(1.1 + 0.22 + 0.037)


def test_without_prefill_workers_it_is_local_and_predicted() -> None:
    route = Router().choose(500, [at(D0)], [], 0.0)
    assert (route.is_local, route.wait_s) == (True, 0.0)
    assert route.ttft_s == pytest.approx(3 * 0.01 + 0.05)


def test_what_only_decode_has_is_returned_when_the_rest_is_long() -> None:
    router = Router()
    decoding(router, D0, 8)
    route = router.choose(3000, [at(D0, 1000)], [at(P0, 400)], 0.0)
    assert (route.way, route.num_returned_tokens, route.prefill_missing) == ("returned", 1000, 2000)
    assert route.ttft_s == pytest.approx(0.22 + 0.009)


def test_a_short_rest_behind_what_only_decode_has_is_local() -> None:
    router = Router()
    decoding(router, D0, 8)
    router.measured = Measured(transfer_s=1e-4)  # as long as computing: 600 tokens back would take 60 ms
    assert router.choose(1050, [at(D0, 1000)], [at(P0, 400)], 0.0).way == "local"


def test_what_is_sent_overlaps_with_computing_but_for_the_last_chunk() -> None:
    router = Router()
    router.measured = Measured(transfer_s=1e-5)
    assert router.choose(3000, [at(D0)], [at(P0)], 0.0).lag_s == pytest.approx(0.01), "1000 tokens of the last step"
    # P has all but 100 tokens: 2900 tokens travel at once, and computing 100 takes 20 ms
    assert router.choose(3000, [at(D0)], [at(P0, 2900)], 0.0).lag_s == pytest.approx(0.03 - 0.02)


def test_returning_takes_place_while_the_prompt_waits() -> None:
    router = with_backlog(P0, 1000)  # 0.11 s
    decoding(router, D0, 8)
    router.measured = Measured(transfer_s=1e-5)
    route = router.choose(3000, [at(D0, 1000)], [at(P0, 0)], 0.0)
    assert route.way == "returned"
    assert route.wait_s == pytest.approx(0.11)


def test_a_worker_with_both_roles_never_hands_over_to_itself() -> None:
    router = Router()
    route = router.choose(2000, [at(P0)], [at(P0)], 0.0)
    assert (route.decode, route.prefill) == (P0, None)
    pairs = Counter(
        (route.decode, route.prefill)
        for _ in range(8)
        for route in [router.choose(2000, [at(P0), at(P1)], [at(P0), at(P1)], 0.0)]
    )
    assert all(d != p for d, p in pairs)


def test_ties_go_round() -> None:
    router = Router()
    routes = [router.choose(2000, [at(D0), at(D1)], [at(P0), at(P1)], 0.0) for _ in range(6)]
    assert Counter(route.decode for route in routes) == {D0: 3, D1: 3}
    assert Counter(route.prefill for route in routes) == {P0: 3, P1: 3}


def test_sequences_are_spread() -> None:
    router = Router()
    decoding(router, D0, 1)
    assert [router.choose(2000, [at(D0), at(D1)], [at(P0)], 0.0).decode for _ in range(3)] == [D1] * 3


def test_one_unknown_worker_and_all_is_counted_in_tokens() -> None:
    route = Router().choose(100, [at(D0), at(D1, speed=None)], [at(P0)], 0.0)
    assert (route.way, route.wait_s, route.ttft_s) == ("remote", None, None)


def test_batch_prompts_do_not_delay_interactive_ones() -> None:
    router = Router()
    decoding(router, D0, 64)
    router.dispatched(Route(D0, P0, 5000, 5000, num_tokens=5000, is_batch=True), 0.0)
    assert router.choose(2000, [at(D0)], [at(P0)], 0.0).wait_s == 0.0
    assert router.choose(2000, [at(D0)], [at(P0)], 0.0, is_batch=True).wait_s == pytest.approx(0.55)


def test_the_overhead_is_part_of_the_prediction_whatever_the_way() -> None:
    router = Router()
    router.measured = Measured(overhead_s=0.5)
    route = router.choose(2000, [at(D0)], [at(P0)], 0.0)
    assert (route.way, route.wait_s) == ("remote", 0.0)
    assert route.ttft_s == pytest.approx(0.22 + 0.5)
    assert route.lag_s == 0.0


# ---- what sequences can spare ----------------------------------------------------------------------------------------


def test_time_lost_counts_as_far_as_it_cannot_be_spared() -> None:
    assert Measured().weight(1.0, 0.02) == HARM
    assert Measured(answer_tokens=100).weight(1.0, 0.02) == HARM
    assert Measured(tpot_target_s=0.05).weight(1.0, 0.02) == HARM, "no answer has ended"
    known = Measured(answer_tokens=100, tpot_target_s=0.05)
    assert known.weight(0.3, 0.02) == pytest.approx(0.1), "3 s can be spared"
    assert known.weight(9.0, 0.02) == 1.0
    assert known.weight(0.001, 0.05) == 1.0, "nothing can be spared"


@pytest.mark.parametrize(("tpot_target_s", "is_local"), [(0.1, True), (0.02, False)])
def test_a_prompt_stays_where_decodes_have_time_to_spare(tpot_target_s: float, is_local: bool) -> None:
    """Local 0.037 s and nine sequences that lose 10 ms; remote 0.079 s."""
    router = with_backlog(P0, 5000)
    decoding(router, D0, 8)
    router.measured = Measured(answer_tokens=2, tpot_target_s=tpot_target_s)
    assert router.choose(100, [at(D0)], [at(P0)], 0.5).is_local == is_local


# ---- time passes -----------------------------------------------------------------------------------------------------


def test_a_backlog_shrinks_with_time_and_is_set_right_by_each_prompt_that_is_done() -> None:
    router = Router()
    first, second = (Route(D0, P0, 1000, 1000, num_tokens=1000, lag_s=0.02) for _ in range(2))
    router.dispatched(first, 1.0)
    router.dispatched(second, 1.05)

    def wait(now: float) -> float:
        return router.backlog_s(P0, SPEED, now, as_prefill=True)

    assert wait(1.05) == pytest.approx(0.22 - 0.05)
    assert wait(1.5) == 0.0
    router.prompt_done(first, 1.5)  # it took longer; what comes after it was begun 20 ms ago
    assert wait(1.5) == pytest.approx(0.11 - 0.02)
    router.prompt_done(second, 1.6)
    assert wait(1.6) == 0.0
    assert router.choose(10, [at(D0)], [at(P0)], 9.0).wait_s is not None


def test_a_worker_that_hangs_does_not_look_idle() -> None:
    """It beats and computes nothing; the other prefill worker keeps up with all that comes."""
    router, sent, done_at = Router(), Counter[NodeRef | None](), 0.0
    for number in range(100):
        now = 0.15 * number
        route = router.choose(1000, [at(D0)], [at(P0), at(P1)], now)  # 0.11 s
        router.dispatched(route, now)
        sent[route.prefill] += 1
        if route.prefill == P1:
            done_at = max(done_at, now) + 0.11
            router.prompt_done(route, done_at)
            router.ended(route)
    assert sent[P0] <= 3
    assert sent[P1] >= 90


def test_a_worker_that_was_idle_has_done_nothing_yet() -> None:
    router = Router()
    route = Route(D0, P0, 1000, 1000, num_tokens=1000)
    router.dispatched(route, 1.0)
    router.prompt_done(route, 2.0)
    router.dispatched(route, 9.0)
    assert router.backlog_s(P0, SPEED, 9.0, as_prefill=True) == pytest.approx(0.11)


def test_the_time_at_a_batch_prompt_is_none_at_the_interactive_ones_that_put_it_aside() -> None:
    router = Router()
    route = Route(D0, P0, 1000, 1000, num_tokens=1000)
    router.dispatched(Route(D0, P0, 1000, 1000, num_tokens=1000, is_batch=True), 1.0)
    router.dispatched(route, 9.0)
    router.dispatched(route, 9.05)
    assert router.backlog_s(P0, SPEED, 9.05, as_prefill=True) == pytest.approx(0.22 - 0.05)


def test_contexts_that_have_ended_slow_no_step_down() -> None:
    attends = Speed(StepCost(0.01, 1e-4, 0.0, 1e-3, 1e-5), token_budget=1000, chunk_size=1000, prompt_budget=200)
    router = Router()
    routes = [Route(D0, None, 1, 0, num_tokens=num_tokens) for num_tokens in (1000, 5000)]
    for route in routes:
        router.dispatched(route, 0.0)
        router.prompt_done(route, 0.0)
    router.ended(routes[1])
    half_a_step_s = (0.01 + 1e-3 + 1000 * 1e-5) / 2
    assert router.backlog_s(D0, attends, 0.0, as_prefill=False) == pytest.approx(half_a_step_s)


def test_when_its_prefill_worker_dies_the_prompt_is_work_of_decode() -> None:
    router = Router()
    route = Route(D0, P0, 1000, 2000, num_tokens=3000)
    router.dispatched(route, 0.0)
    local = route.without_prefill()
    router.rerouted(route, local, 1.0)
    router.forget(P0)
    assert router.backlog_s(P0, SPEED, 1.0, as_prefill=True) == 0.0
    assert router.backlog_s(D0, SPEED, 1.0, as_prefill=False) == pytest.approx(5 * 0.01 + 0.1)
    router.prompt_done(local, 2.0)
    router.ended(local)
    assert (router.load(D0), router.load(P0), router.num_prompting, router.num_decoding) == (0, 0, 0, 0)


@given(st.lists(st.tuples(st.sampled_from(["go", "first", "end"]), st.integers(0, 9), st.integers(1, 5000))))
def test_when_all_is_over_no_load_is_left(steps: list[tuple[str, int, int]]) -> None:
    router, now = Router(), 0.0
    prompting: list[Route] = []
    decoding_: list[Route] = []
    for what, which, num_tokens in [*steps, *[("first", 0, 1)] * len(steps), *[("end", 0, 1)] * len(steps)]:
        now += 0.01
        if what == "go":
            known = [at(D0, which * 50), at(D1)], [at(P0), at(P1, which * 20), at(D1)]
            route = router.choose(num_tokens, *known, now, is_batch=which % 2 == 0)
            router.dispatched(route, now)
            prompting.append(route)
        elif what == "first" and prompting:
            decoding_.append(prompting.pop(which % len(prompting)))
            router.prompt_done(decoding_[-1], now)
        elif what == "end" and decoding_:
            router.ended(decoding_.pop(which % len(decoding_)))
        assert (router.num_prompting, router.num_decoding) == (len(prompting), len(decoding_))
    for ref in (D0, D1, P0, P1):
        assert router.load(ref) == 0
        assert router.backlog_s(ref, SPEED, now, as_prefill=True) == 0.0
        assert router.backlog_s(ref, SPEED, now, as_prefill=False) == 0.0


# ---- against a naive search ------------------------------------------------------------------------------------------

_speeds = st.builds(
    lambda base, token, decode, budget, prompts: Speed(
        StepCost(base, token, 1e-9, decode, 0.0), budget, max(budget // 2, 1), prompts
    ),
    st.floats(1e-3, 0.1),
    st.floats(1e-6, 1e-3),
    st.floats(1e-6, 1e-2),
    st.integers(64, 4096),
    st.integers(16, 1024),
)


def ceil(a: int, b: int) -> int:
    return (a + b - 1) // b


@settings(max_examples=200, deadline=None)
@given(
    num_tokens=st.integers(1, 20_000),
    cached=st.tuples(*[st.integers(0, 20_000)] * 4),
    worker_speeds=st.tuples(*[_speeds] * 4),
    backlogs=st.tuples(*[st.integers(0, 20_000)] * 4),
    sequences=st.tuples(st.integers(0, 64), st.integers(0, 64)),
    now=st.floats(0.0, 5.0),
)
def test_no_other_way_is_cheaper(
    num_tokens: int,
    cached: tuple[int, ...],
    worker_speeds: tuple[Speed, ...],
    backlogs: tuple[int, ...],
    sequences: tuple[int, int],
    now: float,
) -> None:
    """Every way through every pair, each cost written out; nothing travels for free but KV."""
    refs = (D0, D1, P0, P1)
    cached = tuple(min(count, num_tokens - 1) for count in cached)
    speed, has, queued = (dict(zip(refs, values, strict=True)) for values in (worker_speeds, cached, backlogs))
    elsewhere = NodeRef("elsewhere", 1)
    router = Router()
    for ref, count in zip((D0, D1), sequences, strict=True):
        decoding(router, ref, count)
    for ref, count in queued.items():
        if count and ref in (P0, P1):
            router.dispatched(Route(elsewhere, ref, count, count, num_tokens=count), 0.0)
        elif count:
            router.dispatched(Route(ref, None, count, 0, num_tokens=count), 0.0)
    running = {D0: sequences[0], D1: sequences[1], P0: 0, P1: 0}
    placed = {ref: running[ref] + (ref in (D0, D1) and queued[ref] > 0) for ref in refs}

    def parts(ref: NodeRef, num_missing: int) -> tuple[float, float, float, float]:
        """(wait, compute, harm, half a step)"""
        cost = speed[ref].cost
        is_decode = ref in (D0, D1)
        budget = speed[ref].prompt_budget if is_decode else speed[ref].token_budget
        chunk = budget if is_decode else speed[ref].chunk_size
        step = cost.base_s + cost.per_decode_s * running[ref]
        half = step / 2 if running[ref] else 0.0
        backlog = ceil(queued[ref], budget) * step + queued[ref] * (cost.per_prompt_token_s + 1e-9 * queued[ref] / 2)
        tokens = num_missing * (cost.per_prompt_token_s + 1e-9 * (num_tokens - num_missing / 2))
        steps = max(ceil(queued[ref] + num_missing, budget), ceil(num_missing, chunk)) - ceil(queued[ref], budget)
        wait = max(backlog - (now if queued[ref] else 0.0), 0.0) + half
        return wait, steps * step + tokens, HARM * tokens * (placed[ref] + is_decode), half

    costs: dict[tuple[str, NodeRef, NodeRef | None], tuple[float, float]] = {}
    for d in (D0, D1):
        standing = SEQUENCE_WEIGHT * speed[d].cost.per_prompt_token_s * placed[d]
        wait, compute, harm, half = parts(d, num_tokens - has[d])
        costs["local", d, None] = (wait + compute, harm + standing)
        for p, way in product((P0, P1), ("remote", "returned")):
            if way == "returned" and has[p] >= has[d]:
                continue
            wait, compute, harm, _ = parts(p, num_tokens - has[d if way == "returned" else p])
            costs[way, d, p] = (wait + compute + half, harm + standing)
    route = router.choose(
        num_tokens,
        [at(d, has[d], speed[d]) for d in (D0, D1)],
        [at(p, has[p], speed[p]) for p in (P0, P1)],
        now,
    )
    ttft, others = costs[route.way, route.decode, route.prefill]
    assert route.ttft_s == pytest.approx(ttft)
    assert ttft + others <= min(sum(cost) for cost in costs.values()) * (1 + 1e-9) + 1e-9


def test_choosing_among_four_workers_takes_little() -> None:
    router = Router()
    decode, prefill = [at(D0, 300), at(D1)], [at(P0, 100), at(P1)]
    for _ in range(20):
        router.dispatched(router.choose(1000, decode, prefill, 0.0), 0.0)

    def once() -> float:
        started = time.perf_counter()
        for _ in range(100):
            router.choose(1000, decode, prefill, 1.0)
        return (time.perf_counter() - started) / 100

    assert min(once() for _ in range(5)) < 200e-6, "some 30 us on a free core"


@pytest.mark.parametrize("speed", [SPEED, None])
def test_a_router_that_may_not_go_local_goes_remote_while_there_is_another_worker(speed: Speed | None) -> None:
    """By time and by tokens; a short rest of what only decode has is returned first."""
    cold = [at(D0, speed=speed)], [at(P0, speed=speed)]
    warm = [at(D0, 1000, speed)], [at(P0, speed=speed)]
    router = Router(may_be_local=False)
    assert router.choose(20, *cold, 0.0).way == "remote"
    assert router.choose(1020, *warm, 0.0).way == "returned"
    assert router.choose(1020, [at(D0, 1000, speed)], [], 0.0).way == "local"
    assert router.choose(20, [at(D0, speed=speed)], [at(D0, speed=speed)], 0.0).way == "local"  # it has both roles


def test_a_router_that_may_not_go_local_waits_for_a_busy_prefill_worker() -> None:
    """1.1 s of backlog; on D0, which is idle, it would be 11 ms."""
    router = Router(may_be_local=False)
    router.dispatched(Route(NodeRef("elsewhere", 1), P0, 10_000, 10_000, num_tokens=10_000), 0.0)
    route = router.choose(10, [at(D0)], [at(P0)], 0.1)
    assert (route.prefill, route.decode_missing, route.prefill_missing) == (P0, 10, 10)
    assert route.wait_s == pytest.approx(1.0)
    assert route.ttft_s == pytest.approx(1.0 + 0.01 + 0.001)
    assert router.choose(10, [at(D0)], [at(P0), at(P1)], 0.1).prefill == P1
    both = router.choose(10, [at(D0), at(P1)], [at(P0), at(P1)], 0.1)
    assert (both.decode, both.prefill) == (D0, P1), "only P0 would be left to prefill for P1"
