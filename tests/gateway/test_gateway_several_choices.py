"""Several choices of one prompt: one request while it can be one, each choice by itself as soon as it must be."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.messages import AbortRequest, GenerateRequest, NodeRef, PrefillRequest, RequestFailed, Role, TokenChunk
from baton.core.request import FinishReason, SamplingParams, TokenLogprobs, Urgency
from baton.core.timeline import Timeline
from baton.gateway.generation import Generation
from baton.gateway.prompts import Prompt

NUM_CHOICES = 3


@pytest.fixture
def hand(hand_module: Any) -> Any:
    hand = hand_module.HandDriven()
    hand.join(hand_module.decode_info(max_running=8))
    return hand


def assert_idle(hand: Any) -> None:
    assert hand.dispatcher.num_in_flight == hand.dispatcher.num_queued == 0
    assert hand.admission.credits.num_in_flight == hand.admission.num_queued == 0
    assert len(hand.placement._router._loads) == 0
    assert not hand.dispatcher._generations
    assert not hand.dispatcher._attempts


def aborts(hand: Any) -> list[int | None]:
    return [body.choice for _, body in hand.sent if isinstance(body, AbortRequest)]


def requests(hand: Any) -> list[tuple[str, tuple[int, ...], list[int]]]:
    """What decode workers were asked for: the worker, the choices, the output that they begin with."""
    found = [(to, body.request) for to, body in hand.sent if isinstance(body, GenerateRequest)]
    return [(to.node_id, request.choices, request.output_token_ids) for to, request in found]


def test_all_choices_are_one_request_to_each_worker(hand: Any, hand_module: Any) -> None:
    prefill = hand_module.decode_info("prefill-0", roles=(Role.PREFILL,))
    hand.join(prefill)
    generations = hand.submit_choices(NUM_CHOICES)
    assert [generation.choice for generation in generations] == [0, 1, 2]
    assert requests(hand) == [("decode-0", (0, 1, 2), [])]
    assert [to.node_id for to, body in hand.sent if isinstance(body, PrefillRequest)] == ["prefill-0"]
    assert hand.dispatcher.num_in_flight == NUM_CHOICES
    for generation in generations:
        hand.finish(generation)
    assert_idle(hand)


def test_tokens_go_to_their_choice_and_each_ends_by_itself(hand: Any) -> None:
    first, second, third = hand.submit_choices(NUM_CHOICES)
    hand.tell(second, 2)
    hand.tell(first, 1)
    hand.finish(second, 1)
    assert [g.output_token_ids for g in (first, second, third)] == [[7], [8, 8, 8], []]
    assert [g.finish_reason for g in (first, second, third)] == [None, FinishReason.STOP, None]
    hand.finish(first)
    hand.finish(third)
    assert aborts(hand) == []
    assert_idle(hand)


def test_a_cancelled_choice_is_aborted_alone_and_the_last_one_with_its_request(hand: Any) -> None:
    first, second, third = hand.submit_choices(NUM_CHOICES)
    hand.tell(first)
    hand.dispatcher.cancel(second, "a stop string")
    hand.tell(third)
    hand.dispatcher.cancel(first, "a stop string")
    hand.dispatcher.cancel(first, "once more")
    assert aborts(hand) == [1, 0]
    hand.dispatcher.cancel(third, "the client left")
    assert aborts(hand) == [1, 0, None]
    assert [g.finish_reason for g in (first, second, third)] == [FinishReason.ABORT] * 3
    assert_idle(hand)


def test_late_tokens_of_a_cancelled_choice_harm_nobody(hand: Any) -> None:
    first, second, _ = hand.submit_choices(NUM_CHOICES)
    attempt = first.attempt
    hand.dispatcher.cancel(first, "a stop string")
    hand.dispatcher.handle(attempt.route.decode, TokenChunk(attempt.request_id, 0, 0, [5], FinishReason.LENGTH))
    hand.dispatcher.handle(attempt.route.decode, TokenChunk(attempt.request_id, 77, 0, [5]))
    assert (first.output_token_ids, second.output_token_ids) == ([], [])
    assert hand.dispatcher.num_in_flight == 2


def test_who_has_tokens_is_retried_alone_and_who_has_none_together(hand: Any, hand_module: Any) -> None:
    first, second, third, fourth, fifth = hand.submit_choices(5)
    hand.tell(second, 2)
    hand.tell(fourth, 1)
    hand.finish(fifth, 1)
    hand.join(hand_module.decode_info("decode-1", max_running=8))
    hand.leave(NodeRef("decode-0", 1))
    retried = requests(hand)[1:]
    assert sorted(retried) == [("decode-1", (0, 2), []), ("decode-1", (1,), [8, 8]), ("decode-1", (3,), [10])]
    hand.tell(second, 1)
    assert second.output_token_ids == [8, 8, 8]
    for generation in (first, second, third, fourth):
        assert generation.num_retries == 1
        hand.finish(generation)
    assert fifth.num_retries == 0
    assert_idle(hand)


def test_a_refused_request_comes_back_whole(hand: Any) -> None:
    generations = hand.submit_choices(NUM_CHOICES)
    attempt = generations[0].attempt
    hand.dispatcher.handle(attempt.route.decode, RequestFailed(attempt.request_id, "my queue is full", True))
    assert hand.dispatcher.num_queued == NUM_CHOICES
    assert hand.admission.num_queued == 1
    hand.run(until=1.0)
    assert requests(hand) == [("decode-0", (0, 1, 2), [])] * 2
    assert [generation.num_retries for generation in generations] == [0] * 3


def test_what_cannot_be_retried_fails_all_of_its_choices(hand: Any) -> None:
    generations = hand.submit_choices(NUM_CHOICES)
    hand.finish(generations[1])
    attempt = generations[0].attempt
    hand.dispatcher.handle(attempt.route.decode, RequestFailed(attempt.request_id, "logits", False))
    assert [g.error is not None for g in generations] == [True, False, True]
    assert_idle(hand)


def test_a_gap_costs_its_choice_alone_another_attempt(hand: Any) -> None:
    first, second = hand.submit_choices(2)
    hand.tell(first, 2)
    attempt = second.attempt
    hand.dispatcher.handle(attempt.route.decode, TokenChunk(attempt.request_id, 1, 3, [5]))
    hand.run(until=1.0)
    assert [choices for _, choices, _ in requests(hand)] == [(0, 1), (1,)]
    assert aborts(hand) == [1]
    hand.finish(first)
    hand.finish(second)
    assert_idle(hand)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_choices_may_leave_the_queue_in_any_order(hand_module: Any, order: tuple[int, ...]) -> None:
    hand = hand_module.HandDriven()
    before = hand.submit()
    hand.run(until=1.0)
    generations = hand.submit_choices(NUM_CHOICES)
    hand.run(until=2.0)
    behind = hand.submit()
    assert (hand.dispatcher.num_queued, hand.admission.num_queued) == (5, 3)
    assert [hand.dispatcher.place(generation).position for generation in generations] == [2, 2, 2]
    for number, index in enumerate(order[:-1]):
        hand.dispatcher.cancel(generations[index], "not wanted")
        assert (hand.dispatcher.num_queued, hand.admission.num_queued) == (4 - number, 3)
    hand.join(hand_module.decode_info())
    assert [choices for _, choices, _ in requests(hand)] == [(0,), (order[-1],), (0,)]
    for generation in (before, generations[order[-1]], behind):
        hand.finish(generation)
    assert_idle(hand)


def test_all_choices_in_the_queue_are_refused_together(hand_module: Any) -> None:
    hand = hand_module.HandDriven(max_queue_delay_s=2.0)
    generations = hand.submit_choices(NUM_CHOICES)
    hand.run(until=3.0)
    assert all(generation.error is not None for generation in generations)
    assert_idle(hand)


def test_a_gateway_that_stops_fails_all(hand: Any) -> None:
    running = hand.submit_choices(8)
    waiting = hand.submit_choices(NUM_CHOICES)
    hand.dispatcher.stop("shutting down")
    assert all(generation.error is not None for generation in (*running, *waiting))
    assert_idle(hand)


def test_as_many_places_as_choices_and_alone_all_there_are(hand: Any) -> None:
    """Eight places: three choices and five; then none of four is sent until four places are free."""
    first, second, third = hand.submit_choices(3), hand.submit_choices(5), hand.submit_choices(4)
    assert [choices for _, choices, _ in requests(hand)] == [(0, 1, 2), (0, 1, 2, 3, 4)]
    for generation in first:
        hand.finish(generation)
    assert third[0].attempt is None
    hand.finish(second[0])
    assert third[0].attempt is not None
    for generation in (*second[1:], *third):
        hand.finish(generation)
    many = hand.submit_choices(100)
    assert many[0].attempt is not None
    other = hand.submit()
    assert other.attempt is None
    for generation in many[:92]:
        hand.finish(generation)
    assert other.attempt is None, "eight still run"
    hand.finish(many[92])
    assert other.attempt is not None


def test_the_prompt_is_cached_once_and_waited_for_together(hand: Any) -> None:
    first, second = hand.submit_choices(2)
    attempt = first.attempt
    hand.dispatcher.handle(attempt.route.decode, TokenChunk(attempt.request_id, 0, 0, [5], num_cached_tokens=12))
    assert attempt.prompt_done
    hand.dispatcher.handle(attempt.route.decode, TokenChunk(attempt.request_id, 1, 0, [5], num_cached_tokens=12))
    hand.dispatcher.handle(attempt.route.decode, TokenChunk(attempt.request_id, 1, 1, [5]))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (12, 12)


def test_choices_that_wait_for_their_siblings_are_not_given_up(hand: Any) -> None:
    first, second = hand.submit_choices(2, max_tokens=4000)
    for number in range(20):
        hand.at(100.0 * number, lambda: hand.tell(first))
    hand.at(2000.0, lambda: hand.tell(second))
    hand.run(until=2250.0)
    assert first.error is None
    assert second.error is None
    hand.run(until=2310.0)
    assert first.error is not None
    assert second.error is not None
    assert_idle(hand)


# ---- log-probabilities -------------------------------------------------------------------------------------------


def logprobs(*values: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(value) for value in values]


def test_log_probabilities_are_kept_beside_their_tokens(hand: Any) -> None:
    first, second = hand.submit_choices(2)
    attempt, send = first.attempt, hand.dispatcher.handle
    send(attempt.route.decode, TokenChunk(attempt.request_id, 1, 0, [5, 6], logprobs=logprobs(-1, -2)))
    send(attempt.route.decode, TokenChunk(attempt.request_id, 1, 1, [6, 7], logprobs=logprobs(-2, -3)))
    send(attempt.route.decode, TokenChunk(attempt.request_id, 1, 1, [6], logprobs=logprobs(-2)))
    assert second.output_token_ids == [5, 6, 7]
    assert second.logprobs == logprobs(-1, -2, -3)
    assert first.logprobs == []


def test_those_of_the_prompt_are_computed_on_decode_once_and_all_choices_have_them(hand: Any, hand_module: Any) -> None:
    hand.join(hand_module.decode_info("prefill-0", roles=(Role.PREFILL,)))
    prompt = Prompt([1, 2, 3], SamplingParams(max_tokens=8), num_prompt_logprobs=2)
    first, second = hand.dispatcher.submit(prompt, "ns", Timeline(), asyncio.Event(), num_choices=2)
    [asked] = hand.generates
    assert (asked.prefill, asked.request.num_prompt_logprobs) == (None, 2)
    attempt = first.attempt
    chunk = TokenChunk(attempt.request_id, 0, 0, [5], num_cached_tokens=0, prompt_logprobs=logprobs(-1, -2))
    hand.dispatcher.handle(attempt.route.decode, chunk)
    assert first.prompt_logprobs == second.prompt_logprobs == logprobs(-1, -2)
    hand.leave(NodeRef("decode-0", 1))
    hand.join(hand_module.decode_info("decode-1"))
    assert [message.request.num_prompt_logprobs for message in hand.generates[1:]] == [None, None]


def test_a_prompt_alone_is_complete_only_with_its_log_probabilities(hand: Any, hand_module: Any) -> None:
    prompt = Prompt([1, 2, 3], SamplingParams(max_tokens=0), num_prompt_logprobs=0)
    generations = hand.dispatcher.submit(prompt, "ns", Timeline(), asyncio.Event(), num_choices=2)
    hand.leave(NodeRef("decode-0", 1))
    assert [generation.ended for generation in generations] == [False, False]
    hand.join(hand_module.decode_info("decode-1"))
    assert [choices for _, choices, _ in requests(hand)] == [(0,), (0,)], "one is enough: there is nothing to choose"
    attempt = generations[0].attempt
    chunk = TokenChunk(attempt.request_id, 0, 0, [], FinishReason.LENGTH, prompt_logprobs=logprobs(-1, -2))
    hand.dispatcher.handle(attempt.route.decode, chunk)
    assert [g.prompt_logprobs for g in generations] == [logprobs(-1, -2)] * 2
    assert [g.finish_reason for g in generations] == [FinishReason.LENGTH] * 2
    assert_idle(hand)


# ---- whatever comes ----------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "token", "token", "token", "finish", "cancel", "death", "failed", "refused", "tick"]
        ),
        st.integers(0, 10_000),
    ),
    max_size=60,
)


class World:
    """Two decode workers that the test plays. Token number i of choice k is 100 * k + i, on whatever worker."""

    def __init__(self, hand_module: Any):
        self.module = hand_module
        self.hand = hand_module.HandDriven(max_queue=10)
        self.generations: list[Generation] = []
        self.lives = 0
        self.workers = [self.birth(0), self.birth(1)]

    def birth(self, number: int) -> NodeRef:
        self.lives += 1
        ref = NodeRef(f"decode-{number}", self.lives)
        return self.hand.join(self.module.decode_info(ref.node_id, ref=ref, max_running=4))

    @property
    def running(self) -> list[Generation]:
        return [generation for generation in self.generations if generation.attempt is not None]

    def submit(self, number: int) -> None:
        urgency = Urgency(is_batch=number % 3 == 0)
        self.generations += self.hand.submit_choices(1 + number % 6, 16 + number % 40, 1000, urgency)

    def token(self, number: int, reason: FinishReason | None = None) -> None:
        if self.running:
            generation = self.running[number % len(self.running)]
            index = len(generation.output_token_ids)
            token = 100 * generation.choice + index
            chunk = TokenChunk(generation.attempt.request_id, generation.choice, index, [token], reason)
            self.hand.dispatcher.handle(generation.attempt.route.decode, chunk)

    def finish(self, number: int) -> None:
        self.token(number, FinishReason.STOP)

    def cancel(self, number: int) -> None:
        if self.generations:
            self.hand.dispatcher.cancel(self.generations[number % len(self.generations)], "not wanted")

    def death(self, number: int) -> None:
        self.hand.leave(self.workers[number % 2])
        self.workers[number % 2] = self.birth(number % 2)

    def failed(self, number: int, *, retryable: bool = False) -> None:
        if self.running:
            attempt = self.running[number % len(self.running)].attempt
            self.hand.dispatcher.handle(attempt.route.decode, RequestFailed(attempt.request_id, "so it is", retryable))

    def refused(self, number: int) -> None:
        self.failed(number, retryable=True)

    def tick(self, number: int) -> None:
        self.hand.run(until=self.hand.now + 1.0)

    def check(self) -> None:
        """Every choice has its own tokens in order; a request on a worker has each of its choices once."""
        for generation in self.generations:
            wanted = [100 * generation.choice + index for index in range(len(generation.output_token_ids))]
            assert generation.output_token_ids == wanted
            assert generation in generation.party
        for attempt in self.hand.dispatcher._attempts.values():
            assert attempt.party
            assert all(generation.attempt is attempt for generation in attempt.party)
        live = [generation for generation in self.generations if not generation.ended]
        assert len(live) == self.hand.dispatcher.num_in_flight + self.hand.dispatcher.num_queued
        assert self.hand.admission.credits.num_in_flight == self.hand.dispatcher.num_in_flight

    def drain(self) -> None:
        for _ in range(2000):
            if all(generation.ended for generation in self.generations):
                return
            self.hand.run(until=self.hand.now + 0.1)
            self.finish(0)
        raise AssertionError("somebody waits for ever")


@settings(deadline=None, max_examples=150, derandomize=True)
@given(STEPS)
def test_whatever_comes_each_choice_ends_once_and_nothing_is_held(
    hand_module: Any, steps: list[tuple[str, int]]
) -> None:
    world = World(hand_module)
    for name, number in steps:
        action: Callable[[int], None] = getattr(world, name)
        if name != "submit" or world.hand.admission.num_queued < 10:
            action(number)
        world.check()
    world.drain()
    assert_idle(world.hand)
