"""Early rejection: three times as much as the server can do, on a clock that the test moves."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from baton.core.queueing import FAIR, FCFS, PRIORITY, SHORTEST, QueuePolicy
from baton.core.request import Urgency
from baton.core.step_cost import StepCost
from baton.gateway.generation import Generation, Unavailable

TARGET_S = 0.5
PROMPT_S = 0.1
ANSWER_S = 1.0


@dataclass
class Seen:
    arrived: float
    first_token: float | None = None
    refused: float | None = None
    retry_after: int | None = None


@dataclass
class Load:
    """Four places; the first token comes 0.1 s after a request is sent out, and its place is free 1 s after that."""

    hand: Any
    seen: list[Seen] = field(default_factory=list)
    open: dict[int, Generation] = field(default_factory=dict)
    most_queued: int = 0

    def arrive(self) -> None:
        seen = Seen(self.hand.now)
        self.seen.append(seen)
        try:
            self.open[len(self.seen) - 1] = self.hand.submit()
        except Unavailable as error:
            seen.refused, seen.retry_after = self.hand.now, error.retry_after
        self.look()

    def look(self) -> None:
        self.most_queued = max(self.most_queued, self.hand.dispatcher.num_queued)
        for number, generation in list(self.open.items()):
            if generation.error is not None:
                assert generation.error.status == 429
                self.seen[number].refused = self.hand.now
                self.seen[number].retry_after = generation.error.retry_after
                del self.open[number]
            elif generation.attempt is not None:
                self.hand.at(self.hand.now + PROMPT_S, lambda g=generation, n=number: self.begin(g, n))
                self.hand.at(self.hand.now + PROMPT_S + ANSWER_S, lambda g=generation: self.end(g))
                del self.open[number]

    def begin(self, generation: Generation, number: int) -> None:
        self.seen[number].first_token = self.hand.now
        self.hand.tell(generation)

    def end(self, generation: Generation) -> None:
        self.hand.finish(generation)
        self.look()

    def run(self, until: float) -> None:
        while self.hand.now < until:
            self.hand.run(min(self.hand.now + 0.01, until))
            self.look()


@pytest.mark.parametrize("policy", [FCFS, PRIORITY, FAIR, SHORTEST])
@pytest.mark.parametrize("knows_costs", [True, False])
def test_three_times_the_capacity(hand_module: Any, policy: QueuePolicy, knows_costs: bool) -> None:
    """Capacity 4 / 1.1 s = 3.6 a second; 11 a second come for a minute, then one a second."""
    predicted = (lambda: (0.0, PROMPT_S)) if knows_costs else None
    hand = hand_module.HandDriven(policy=policy, ttft_target_s=TARGET_S, predicted=predicted)
    hand.join(hand_module.decode_info())
    load, random = Load(hand), Random(1)
    at = 0.0
    while (at := at + random.expovariate(11.0)) < 60.0:
        hand.at(at, load.arrive)
    for second in range(60, 90):
        hand.at(second + 0.5, load.arrive)
    load.run(92.0)

    overload = [seen for seen in load.seen if seen.arrived < 60.0]
    accepted = [seen for seen in overload if seen.first_token is not None]
    refused = [seen for seen in overload if seen.refused is not None]
    assert len(accepted) + len(refused) == len(overload)
    assert all(seen.refused - seen.arrived <= TARGET_S for seen in refused if seen.refused is not None)
    assert all(seen.retry_after is not None and 1 <= seen.retry_after <= 60 for seen in refused)
    # Without costs a request is given up at the target, and its own computing comes on top.
    late = PROMPT_S if not knows_costs else 0.0
    in_time = [s for s in accepted if s.first_token is not None and s.first_token - s.arrived <= TARGET_S + late + 1e-9]
    assert len(in_time) == len(accepted)
    assert len(accepted) >= 0.9 * 60 * 4 / 1.1  # the places did not stand empty
    assert load.most_queued <= 20  # before the rate is known, a target's worth of arrivals and some
    after = [seen for seen in load.seen if seen.arrived > 62.0]
    assert all(seen.first_token is not None for seen in after)
    assert hand.dispatcher.num_queued == hand.dispatcher.num_in_flight == 0


def test_a_long_backlog_at_the_prefill_workers_refuses_at_once(hand_module: Any) -> None:
    """There is credit, but the prompt's computing would begin too late. Retry-After tells when it would not."""
    hand = hand_module.HandDriven(ttft_target_s=TARGET_S, predicted=lambda: (2.4, 2.5))
    hand.join(hand_module.decode_info())
    generation = hand.submit()
    assert generation.error is not None
    assert (generation.error.status, generation.error.code) == (429, "overloaded")
    assert generation.error.retry_after == 10
    assert "500 ms target" in str(generation.error)
    assert hand.sent == []
    assert hand.dispatcher.num_queued == 0


def test_predictions_that_are_too_good_are_learned_from(hand_module: Any) -> None:
    """0.05 s are predicted where it takes 0.1: without a margin whoever is accepted in the last moment is late."""
    hand = hand_module.HandDriven(ttft_target_s=TARGET_S, predicted=lambda: (0.0, PROMPT_S / 2))
    hand.join(hand_module.decode_info())
    load, random = Load(hand), Random(2)
    at = 0.0
    while (at := at + random.expovariate(11.0)) < 60.0:
        hand.at(at, load.arrive)
    load.run(62.0)
    accepted = [s for s in load.seen if s.first_token is not None]
    late = [s for s in accepted if s.first_token is not None and s.first_token - s.arrived > TARGET_S + 1e-9]
    assert len(accepted) >= 190
    assert len(late) <= 2


def test_while_nothing_can_be_predicted_prompts_do_not_pile_up(hand_module: Any) -> None:
    """No first token has come for a quarter of the target: whoever comes now waits here, where it has a deadline."""
    hand = hand_module.HandDriven(ttft_target_s=TARGET_S)
    hand.join(hand_module.decode_info("decode-0", max_running=64))
    first = hand.submit()
    second = hand.submit()
    assert second.attempt is not None
    hand.run(0.2)
    third, batch = hand.submit(), hand.submit(urgency=Urgency(is_batch=True))
    assert third.attempt is None
    hand.tell(first)
    assert third.attempt is None  # the second has waited as long
    hand.tell(second)
    hand.run(0.3)
    assert third.attempt is not None
    assert batch.attempt is not None
    hand.run(0.6)
    assert hand.submit(urgency=Urgency(is_batch=True)).attempt is not None  # batch has no target
    fourth = hand.submit()
    assert fourth.attempt is None
    hand.run(1.1)
    assert fourth.error is not None
    assert fourth.error.status == 429


def test_a_prompt_longer_than_the_target_is_served_on_an_idle_server(hand_module: Any) -> None:
    hand = hand_module.HandDriven(ttft_target_s=TARGET_S, predicted=lambda: (0.0, 30.0))
    hand.join(hand_module.decode_info())
    assert hand.submit().attempt is not None


def test_without_a_target_nobody_is_refused_early(hand_module: Any) -> None:
    hand = hand_module.HandDriven(predicted=lambda: (1000.0, 2000.0))
    hand.join(hand_module.decode_info())
    assert hand.submit().attempt is not None


def test_an_answer_that_has_begun_has_no_deadline(hand_module: Any) -> None:
    """Its worker dies; the other one is full for longer than the target."""
    from baton.core.messages import NodeRef

    hand = hand_module.HandDriven(ttft_target_s=TARGET_S, predicted=lambda: (0.0, 0.1))
    hand.join(hand_module.decode_info("decode-0", max_running=1))
    begun = hand.submit()
    hand.tell(begun, 3)
    hand.join(hand_module.decode_info("decode-1", max_running=1))
    other = hand.submit()
    hand.leave(NodeRef("decode-0", 1))
    hand.run(5.0)
    assert begun.error is None
    assert begun.attempt is None
    hand.finish(other)
    assert begun.attempt is not None
    hand.finish(begun)
    assert begun.output_token_ids == [7] * 4


def test_an_answer_in_two_attempts_is_one_answer(hand_module: Any) -> None:
    hand = hand_module.HandDriven()
    first = hand.join(hand_module.decode_info("decode-0"))
    generation = hand.submit()
    hand.tell(generation, 3)
    learned: list[tuple[int, bool]] = []
    hand.placement.answered = lambda num_tokens, now, was_cut: learned.append((num_tokens, was_cut))
    hand.join(hand_module.decode_info("decode-1"))
    hand.leave(first)
    assert generation.num_retries == 1
    assert learned == []
    hand.finish(generation, 2)
    assert learned == [(5, False)]


def test_batch_teaches_nothing_about_first_tokens(hand_module: Any) -> None:
    """It is late because it makes way; an interactive request does not."""
    hand = hand_module.HandDriven(ttft_target_s=TARGET_S)
    ref = hand.join(hand_module.decode_info())
    cost = StepCost(0.01, 0.001, 0.0, 0.0, 0.0, 100, 0.1, 100, 100)
    hand.membership.workers[ref].status = replace(hand_module.status(**{"token budget": 64}), step_cost=cost)
    hand.now = 1.0
    for _ in range(100):
        batch = hand.submit(urgency=Urgency(is_batch=True))
        hand.now += 30.0
        hand.finish(batch)
    interactive = hand.submit()
    assert interactive.attempt.route.ttft_s == pytest.approx(0.01 + 16 * 0.001 + 1e-4)


def test_the_cap_that_a_worker_reports_bounds_what_it_is_sent(hand_module: Any) -> None:
    hand = hand_module.HandDriven()
    ref = hand.join(hand_module.decode_info(max_running=64))
    hand.dispatcher.handle(ref, hand_module.status(cap=4))
    generations = [hand.submit() for _ in range(10)]
    assert len(hand.generates) == 4
    hand.dispatcher.handle(ref, hand_module.status(cap=10))
    hand.run(hand_module.TICK_INTERVAL_S)
    assert len(hand.generates) == 10
    for generation in generations:
        hand.finish(generation)
    assert hand.admission.credits.num_in_flight == 0


def test_who_fits_no_worker_any_more_does_not_hold_up_those_behind(hand_module: Any) -> None:
    """vllm-project/vllm #39734: the head can never be served, and everybody behind it waits for ever."""
    hand = hand_module.HandDriven()
    large = hand.join(hand_module.decode_info("decode-0", max_running=1))
    running, big, behind = hand.submit(), hand.submit(num_tokens=4000), hand.submit()
    small = hand.join(hand_module.decode_info("decode-1", num_blocks=8, max_running=2))
    assert big.error is None
    assert behind.attempt is not None, "the worker that is free could not serve the one in front of it"
    assert behind.attempt.route.decode == small
    hand.leave(large)
    assert big.error is not None
    assert big.error.status == 503
    assert "4016 tokens" in str(big.error)
    assert running.attempt is not None
    assert running.attempt.route.decode == small


@pytest.mark.parametrize("how", ["dispatch", "abort"])
def test_a_worker_found_gone_while_sending_is_seen_to_afterwards(hand_module: Any, how: str) -> None:
    """Something is sent to a worker that cannot be reached: whoever runs there goes on elsewhere."""
    hand = hand_module.HandDriven()
    first = hand.join(hand_module.decode_info("decode-0", max_running=3))
    generations = [hand.submit() for _ in range(2)]
    hand.tell(generations[0], 2)
    hand.unreachable.add(first)
    if how == "dispatch":
        generations.append(hand.submit())
        assert not generations[-1].was_dispatched
    else:
        hand.dispatcher.cancel(generations.pop(), "the client left")
    assert hand.dispatcher.num_queued == len(generations)
    assert hand.dispatcher.num_in_flight == hand.admission.credits.num_in_flight == 0
    second = hand.join(hand_module.decode_info("decode-1", max_running=3))
    assert [g.attempt.route.decode for g in generations] == [second] * len(generations)
    for generation in generations:
        hand.finish(generation)
    assert hand.admission.credits.num_in_flight == hand.dispatcher.num_queued == 0
