"""A fleet of unlike workers: who waits for a large one does not keep small ones idle, and loses nothing by that."""

from typing import Any

import pytest

from baton.core.messages import NodeRef
from baton.core.request import Urgency
from baton.gateway.generation import Generation

BIG, SMALL, TINY = NodeRef("big", 1), NodeRef("small", 1), NodeRef("tiny", 1)
BATCH = Urgency(is_batch=True)


@pytest.fixture
def hand(hand_module: Any) -> Any:
    """Contexts of 8192, 1024 and 128 tokens; one request at a time on each."""
    hand = hand_module.HandDriven()
    for ref, context_length in ((BIG, 8192), (SMALL, 1024), (TINY, 128)):
        hand.join(hand_module.decode_info(ref.node_id, context_length=context_length, max_running=1))
    return hand


def runs_on(generation: Generation) -> NodeRef | None:
    return generation.attempt.route.decode if generation.attempt else None


def occupy(hand: Any, *refs: NodeRef) -> dict[NodeRef, Generation]:
    sizes = {BIG: 4000, SMALL: 900, TINY: 100}
    running = {ref: hand.submit(sizes[ref], 16) for ref in refs}
    assert {ref: runs_on(generation) for ref, generation in running.items()} == {ref: ref for ref in refs}
    return running


def test_small_requests_pass_a_head_that_small_workers_cannot_hold(hand: Any) -> None:
    running = occupy(hand, BIG)
    head = hand.submit(4000, 16)
    first, second = hand.submit(900, 16), hand.submit(100, 16)
    assert (runs_on(head), runs_on(first), runs_on(second)) == (None, SMALL, TINY)
    hand.finish(running[BIG])
    assert runs_on(head) == BIG


def test_the_head_keeps_every_worker_that_it_fits(hand: Any) -> None:
    """However many small ones come: the next place on the large worker is the head's."""
    running = occupy(hand, BIG)
    head = hand.submit(4000, 16)
    small = [hand.submit(100, 16) for _ in range(50)]
    for generation in small[:10]:
        if generation.attempt is not None:
            hand.finish(generation)
    assert all(runs_on(generation) != BIG for generation in small)
    hand.finish(running[BIG])
    assert runs_on(head) == BIG


def test_who_is_passed_keeps_its_workers_too(hand: Any) -> None:
    running = occupy(hand, BIG, SMALL)
    head, passed, third, tiny = (hand.submit(size, 16) for size in (4000, 900, 900, 100))
    assert [runs_on(g) for g in (head, passed, third, tiny)] == [None, None, None, TINY]
    hand.finish(running[SMALL])
    assert [runs_on(g) for g in (head, passed, third)] == [None, SMALL, None]


def test_among_equal_workers_nobody_passes(hand_module: Any) -> None:
    hand = hand_module.HandDriven()
    for name in ("a", "b"):
        hand.join(hand_module.decode_info(name, num_blocks=64, context_length=1024, max_running=4))
    running = [hand.submit(700, 16), hand.submit(700, 16)]
    head, small = hand.submit(900, 16), hand.submit(16, 16)
    assert all(runs_on(generation) for generation in running)
    assert (runs_on(head), runs_on(small)) == (None, None), "the small one would fit, and the next, for ever"


def test_batch_does_not_pass_who_waits(hand: Any) -> None:
    occupy(hand, BIG)
    head = hand.submit(4000, 16)
    batch = hand.submit(100, 16, BATCH)
    assert (runs_on(head), runs_on(batch)) == (None, None)


def test_who_fits_nowhere_behind_a_head_waits_for_its_own_turn(hand: Any) -> None:
    occupy(hand, BIG)
    head = hand.submit(4000, 16)
    hand.leave(TINY)
    hand.leave(SMALL)
    assert runs_on(hand.submit(100, 16)) is None
    assert head.error is None
