"""When a request's turn comes, before the queue has moved: by what steps cost and how long the answers will be."""

from typing import Any

import pytest
from msgspec.structs import replace

from baton.core.messages import NodeRef
from baton.core.step_cost import StepCost

COST = StepCost(0.010, 0.001, 0.0, 0.005, 0.0, 100, 0.1, 100, 100)


def start_s(hand: Any, generation: Any) -> float | None:
    place = hand.dispatcher.place(generation)
    return None if place is None else place.start_s


def report(hand: Any, ref: NodeRef, status: Any) -> None:
    hand.membership.heard(ref, status, hand.now)


def test_a_place_comes_free_when_an_answer_ends(hand_module: Any) -> None:
    hand = hand_module.HandDriven()
    ref = hand.join(hand_module.decode_info(max_running=2))
    short, long = hand.submit(16, 20), hand.submit(16, 100)
    waiting = [hand.submit() for _ in range(3)]
    assert start_s(hand, waiting[0]) is None, "nothing is known"
    hand.now = 1.0
    status = replace(hand_module.status(cap=2), step_cost=COST, available_blocks=4096)
    status = replace(status, settings={"cap": 2, "token budget": 256})
    report(hand, ref, status)
    # A step of two takes 20 ms; the answers get 20 and 100 tokens; then those two places come free once more.
    assert [start_s(hand, g) for g in waiting] == pytest.approx([0.4, 2.0, 2.4])
    hand.tell(long, 10)
    assert start_s(hand, waiting[1]) == pytest.approx(1.8)
    assert start_s(hand, short) is None, "it does not wait"


def test_what_the_queue_has_shown_goes_before_what_is_predicted(hand_module: Any) -> None:
    hand = hand_module.HandDriven()
    ref = hand.join(hand_module.decode_info(max_running=1))
    report(hand, ref, replace(hand_module.status(cap=1), step_cost=COST, settings={"cap": 1, "token budget": 256}))
    running = hand.submit(16, 1000)
    waiting = [hand.submit(16, 1000) for _ in range(5)]
    for second in (1.0, 2.0, 3.0, 4.0):
        hand.now = second
        hand.finish(running)
        running = next(generation for generation in waiting if generation.attempt is not None)
        waiting.remove(running)
    assert start_s(hand, waiting[0]) == pytest.approx(1.0)
