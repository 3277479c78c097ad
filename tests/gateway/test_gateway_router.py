"""Routes and their costs, by literals."""

from collections import Counter

import pytest

from baton.core.messages import NodeRef
from baton.gateway.loads import SEQUENCE_WEIGHT
from baton.gateway.router import Route, Router
from baton.gateway.ways import LOCAL_TOKENS, Candidate

D0, D1, P0, P1 = (NodeRef(name, 1) for name in ("decode-0", "decode-1", "prefill-0", "prefill-1"))


def at(ref: NodeRef, cached: int = 0) -> Candidate:
    return Candidate(ref, cached)


@pytest.mark.parametrize(
    ("num_tokens", "decode_cached", "prefill_cached", "goes_through_prefill"),
    [
        (5, 0, 0, True),  # cold and short
        (5000, 0, 0, True),
        (320, 304, 192, False),  # second turn: decode has prompt and answer, prefill the prompt
        (320, 304, 304, True),  # both have the same
        (320, 304, 288, False),  # one block decides
        (2000, 64, 0, True),  # what is left is long: decode returns what it has
        (2000, 1000, 0, True),
        (2000, 2000 - LOCAL_TOKENS, 1100, False),
        (2000, 2000 - LOCAL_TOKENS - 1, 1500, True),
        (64, 64, 64, True),  # one token is always computed
        (64, 64, 48, False),
        (300, 0, 256, True),
    ],
)
def test_prefill_or_local(num_tokens: int, decode_cached: int, prefill_cached: int, goes_through_prefill: bool) -> None:
    route = Router().choose(num_tokens, [at(D0, decode_cached)], [at(P0, prefill_cached)], 0.0)
    assert route.prefill == (P0 if goes_through_prefill else None)
    assert route.decode_missing == max(num_tokens - decode_cached, 1)


def test_a_long_rest_goes_through_prefill_after_decode_returned_what_only_it_has() -> None:
    route = Router().choose(2000, [at(D0, 1000)], [at(P0, 400)], 0.0)
    assert route == Route(D0, P0, decode_missing=1000, prefill_missing=1000, num_returned_tokens=1000, num_tokens=2000)


def test_with_a_returned_prefix_the_least_loaded_prefill_worker_is_chosen() -> None:
    router = Router()
    router.dispatched(Route(D0, P0, 0, 500), 0.0)
    route = router.choose(2000, [at(D0, 1000)], [at(P0, 400), at(P1, 0)], 0.0)
    assert (route.prefill, route.num_returned_tokens) == (P1, 1000)


def test_nothing_is_returned_when_prefill_has_as_much() -> None:
    assert Router().choose(2000, [at(D0, 400)], [at(P0, 400)], 0.0).num_returned_tokens == 0


def test_without_prefill_workers_it_is_local() -> None:
    assert Router().choose(5000, [at(D0)], [], 0.0) == Route(D0, None, 5000, 0, num_tokens=5000)


def test_ties_go_round() -> None:
    router = Router()
    chosen = Counter(router.choose(100, [at(D0), at(D1)], [at(P0), at(P1)], 0.0).decode for _ in range(6))
    assert chosen == {D0: 3, D1: 3}


def test_load_counts_from_dispatch() -> None:
    """Six long prompts at once are split three to three, before any answer."""
    router = Router()
    for _ in range(6):
        router.dispatched(router.choose(1000, [at(D0)], [at(P0), at(P1)], 0.0), 0.0)
    assert (router.load(P0), router.load(P1)) == (3000, 3000)


def test_a_match_is_worth_the_tokens_it_saves() -> None:
    router = Router()
    chosen = []
    for _ in range(6):  # D0 has 256 of 300 tokens: worth four running sequences
        route = router.choose(300, [at(D0, 256), at(D1)], [], 0.0)
        router.dispatched(route, 0.0)
        router.prompt_done(route, 0.0)
        chosen.append(route.decode)
    assert chosen[:4] == [D0] * 4
    assert D1 in chosen[4:]
    assert router.load(D0) + router.load(D1) == 6 * SEQUENCE_WEIGHT


def test_load_returns_to_zero() -> None:
    router = Router()
    route = Route(D0, P0, 50, 100)
    router.dispatched(route, 0.0)
    assert (router.load(D0), router.load(P0)) == (50 + SEQUENCE_WEIGHT, 100)
    router.prompt_done(route, 0.0)
    assert (router.load(D0), router.load(P0)) == (SEQUENCE_WEIGHT, 0)
    router.ended(route)
    assert (router.load(D0), router.load(P0)) == (0, 0)


def test_the_load_of_a_worker_that_left_is_gone() -> None:
    router = Router()
    route = Route(D0, P0, 50, 100)
    router.dispatched(route, 0.0)
    router.forget(P0)
    router.prompt_done(route, 0.0)
    router.ended(route)
    assert (router.load(D0), router.load(P0)) == (0, 0)
