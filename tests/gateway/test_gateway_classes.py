"""Who is served, over time: keys, classes, batch. The dispatcher on a clock that the test moves."""

from collections import Counter
from typing import Any

import pytest

from baton.core.queueing import FAIR, PRIORITY
from baton.core.request import Urgency
from baton.gateway.admission import BATCH_DELAY_S
from baton.gateway.dispatcher import STALL_S
from baton.gateway.generation import Generation, Unavailable

BATCH = Urgency(is_batch=True)


class Server:
    """One worker of four places; each answer takes a second and has ten tokens. Clients that are refused go away."""

    def __init__(self, hand: Any, **info: Any) -> None:
        self.hand = hand
        self.live: dict[str, Generation] = {}
        self.done: Counter[tuple[str, int, bool]] = Counter()
        self.refused: Counter[tuple[str, int, bool]] = Counter()
        self.num_sent = 0
        self.waiting: list[Generation] = []

    def offer(self, urgency: Urgency, num_tokens: int = 16) -> None:
        try:
            self.waiting.append(self.hand.submit(num_tokens, 10, urgency))
        except Unavailable:
            self.refused[who(urgency)] += 1
        self.look()

    def look(self) -> None:
        """Whatever has been sent out since the last look ends a second later."""
        still = []
        for generation in self.waiting:
            if generation.error is not None:
                self.refused[who(generation.urgency)] += 1
            elif generation.attempt is None:
                still.append(generation)
            else:
                self.hand.at(self.hand.now + 1.0, lambda g=generation: self.end(g))
        self.waiting = still

    def end(self, generation: Generation) -> None:
        self.hand.finish(generation, 10)
        self.done[who(generation.urgency)] += 1
        self.look()


def who(urgency: Urgency) -> tuple[str, int, bool]:
    return urgency.key, urgency.priority, urgency.is_batch


def arrivals(hand: Any, server: Server, urgency: Urgency, per_s: float, until: float) -> None:
    for number in range(int(per_s * until)):
        hand.at((number + 0.5) / per_s, lambda: server.offer(urgency))


def test_two_keys_get_the_same_whatever_they_offer(hand_module: Any) -> None:
    """Ten to one are offered, both more than half of the four a second that there are."""
    hand = hand_module.HandDriven(policy=FAIR, max_queue=32)
    hand.join(hand_module.decode_info())
    server = Server(hand)
    greedy, modest = Urgency(key="greedy"), Urgency(key="modest")
    arrivals(hand, server, greedy, 30.0, 60.0)
    arrivals(hand, server, modest, 3.0, 60.0)
    hand.run(60.0)
    done = {key: server.done[who(urgency)] for key, urgency in (("greedy", greedy), ("modest", modest))}
    assert sum(done.values()) == pytest.approx(4 * 60, abs=8)
    assert done["modest"] == pytest.approx(done["greedy"], rel=0.1)


def test_a_key_that_asks_for_less_than_its_share_gets_all_of_it(hand_module: Any) -> None:
    hand = hand_module.HandDriven(policy=FAIR, max_queue=32)
    hand.join(hand_module.decode_info())
    server = Server(hand)
    modest = Urgency(key="modest")
    arrivals(hand, server, Urgency(key="greedy"), 30.0, 60.0)
    arrivals(hand, server, modest, 1.0, 58.0)
    hand.run(60.0)
    assert server.refused[who(modest)] == 0
    assert server.done[who(modest)] >= 57


def test_the_lowest_class_moves_under_continuous_high_load(hand_module: Any) -> None:
    hand = hand_module.HandDriven(policy=PRIORITY, max_queue=64)
    hand.join(hand_module.decode_info())
    server = Server(hand)
    high, low = Urgency(priority=0), Urgency(priority=4)
    arrivals(hand, server, high, 4.2, 120.0)
    arrivals(hand, server, low, 0.1, 120.0)
    hand.run(120.0)
    # Ageing lifts it by a class each ten seconds: after forty it stands among the high ones, by its time of arrival.
    assert server.done[who(low)] >= 6
    assert server.done[who(high)] >= 4 * 120 - 20


def test_batch_takes_only_what_is_left(hand_module: Any) -> None:
    hand = hand_module.HandDriven(max_queue=64)
    hand.join(hand_module.decode_info())
    server = Server(hand)
    for _ in range(200):
        server.offer(BATCH)
    arrivals(hand, server, Urgency(), 2.0, 30.0)
    waits: list[float] = []
    for number in range(60):  # each interactive one is sent out at once
        hand.at((number + 0.5) / 2.0, lambda: waits.append(hand.admission.num_queued - hand.admission.num_batch_queued))
    hand.run(31.0)
    assert set(waits) == {0}
    assert server.done[who(Urgency())] == 60
    # Batch had three of four places at most, and no new one while two interactive requests ran beside one of its own.
    assert 30 <= server.done[who(BATCH)] <= 3 * 31


def test_batch_waits_while_anybody_waits(hand_module: Any) -> None:
    hand = hand_module.HandDriven(max_queue=64)
    hand.join(hand_module.decode_info())
    server = Server(hand)
    server.offer(BATCH)
    for _ in range(8):
        server.offer(Urgency())
    batch = hand.submit(urgency=BATCH)
    hand.run(0.9)
    assert batch.attempt is None
    hand.run(1.05)  # the second four have begun, and the first batch request has ended
    assert batch.attempt is None
    hand.run(2.05)
    assert batch.attempt is not None


def test_batch_on_a_worker_may_make_way_for_as_long_as_it_may_wait_in_the_queue(hand_module: Any) -> None:
    """Interactive requests that keep coming pause or preempt it: no token for minutes is not a broken worker."""
    hand = hand_module.HandDriven()
    hand.join(hand_module.decode_info())
    batch, interactive = hand.submit(urgency=BATCH), hand.submit()
    hand.now = STALL_S + 1.0
    hand.dispatcher.tick(hand.now)
    assert (interactive.error.status, batch.error) == (503, None)
    hand.now = BATCH_DELAY_S + 1.0
    hand.dispatcher.tick(hand.now)
    assert batch.error.status == 503
    assert hand.admission.credits.num_in_flight == 0


def test_urgency_reaches_both_workers(hand_module: Any) -> None:
    from baton.core.messages import PrefillRequest, Role

    hand = hand_module.HandDriven()
    hand.join(hand_module.decode_info())
    hand.join(hand_module.decode_info("prefill-0", roles=(Role.PREFILL,)))
    urgency = Urgency(1, "key", False)
    hand.submit(urgency=urgency)
    (prompt,) = [body for _, body in hand.sent if isinstance(body, PrefillRequest)]
    assert prompt.urgency == hand.generates[0].request.urgency == urgency
