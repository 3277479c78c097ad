"""How fast the queue moves is judged by requests that were served, not by refusals or lost workers."""

from typing import Any

import pytest

from baton.core.messages import RequestFailed
from baton.core.request import FinishReason
from baton.gateway.generation import Generation


def estimate(hand: Any, generation: Generation) -> float | None:
    place = hand.dispatcher.place(generation)
    assert place is not None
    start_s: float | None = place.start_s
    return start_s


def three_end(hand: Any, how: str, in_flight: list[Generation]) -> None:
    """At 1, 2 and 3 s."""
    for second, generation in enumerate(in_flight, start=1):
        hand.now = float(second)
        attempt = generation.attempt
        assert attempt is not None
        match how:
            case "answered":
                hand.finish(generation)
            case "its client has enough":
                hand.tell(generation)
                hand.dispatcher.cancel(generation, "a stop string was generated")
            case "its client leaves before anything has come":
                hand.dispatcher.cancel(generation, "the client left")
            case "refused":
                failed = RequestFailed(attempt.request_id, "no room", retryable=True)
                hand.dispatcher.handle(attempt.route.decode, failed)
            case "failed":
                failed = RequestFailed(attempt.request_id, "broken", retryable=False)
                hand.dispatcher.handle(attempt.route.decode, failed)
            case "lost tokens":
                hand.tell(generation, 0, FinishReason.ABORT)
            case "its worker dies":
                hand.leave(attempt.route.decode)


@pytest.mark.parametrize(
    ("how", "is_service"),
    [
        ("answered", True),
        ("its client has enough", True),
        ("its client leaves before anything has come", False),
        ("refused", False),
        ("failed", False),
        ("lost tokens", False),
        ("its worker dies", False),
    ],
)
def test_only_service_counts(hand_module: Any, how: str, is_service: bool) -> None:
    hand = hand_module.HandDriven()
    for number in range(3):
        hand.join(hand_module.decode_info(f"decode-{number}", max_running=1))
    in_flight = [hand.submit() for _ in range(3)]
    waiting = [hand.submit() for _ in range(5)]
    three_end(hand, how, in_flight)
    assert (estimate(hand, waiting[-1]) is not None) is is_service
    # And the credits: places are given away ahead of time at the rate at which they have come free.
    num_releases = sum(len(credit.releases) for credit in hand.admission.credits._credits.values())
    assert num_releases == (3 if is_service else 0)
