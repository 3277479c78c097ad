"""The queue: its order and bounds, what it predicts, and when it refuses early. By literals."""

import pytest

from baton.core.errors import LocalProtocolError
from baton.core.messages import NodeRef
from baton.core.queueing import FAIR, FCFS, PRIORITY, QueuePolicy, Waiting
from baton.core.request import DEFAULT_PRIORITY, Urgency
from baton.gateway.admission import BATCH_DELAY_S, BATCH_QUEUE, TICK_INTERVAL_S, Admission, Place
from baton.gateway.credits import Ask

D0 = NodeRef("decode-0", 1)


def with_worker(
    policy: QueuePolicy = FCFS, *, max_queue: int = 2, delay_s: float = 60.0, target_s: float | None = None
) -> Admission:
    admission = Admission(max_queue, delay_s, policy, target_s)
    admission.credits.add_worker(D0, block_size=16, num_blocks=1000, max_running=100)
    return admission


def released(admission: Admission, *times: float) -> None:
    for at in times:
        admission.credits.take(f"released at {at}", D0, Ask(1, 0, 1), at)
        admission.release(f"released at {at}", at)


def heads(admission: Admission, now: float) -> list[str]:
    names = []
    while (entry := admission.head(now)) is not None:
        names.append(entry.request_id)
        admission.dequeue(entry.request_id)
    return names


# ---- order and bounds ----------------------------------------------------------------------------------------------


def test_first_come_first_served_and_who_returns_before_all() -> None:
    admission = with_worker()
    admission.enqueue(Waiting("a", 0.0))
    admission.enqueue(Waiting("batch", 0.0, is_batch=True))
    admission.enqueue(Waiting("b", 1.0, priority=0))
    admission.enqueue(Waiting("back", 2.0), returning=True)
    with pytest.raises(LocalProtocolError):
        admission.enqueue(Waiting("a", 3.0))
    admission.dequeue("a")
    admission.dequeue("a")
    assert heads(admission, 3.0) == ["back", "b", "batch"]
    assert admission.num_queued == 0


def test_the_policy_decides_the_order() -> None:
    admission = with_worker(PRIORITY)
    admission.enqueue(Waiting("low", 0.0, priority=4))
    admission.enqueue(Waiting("high", 1.0, priority=0))
    assert heads(admission, 1.0) == ["high", "low"]


def test_each_class_has_its_own_length() -> None:
    admission = with_worker(max_queue=2)
    for number in range(2):
        assert not admission.is_full(is_batch=False)
        admission.enqueue(Waiting(f"i{number}", 0.0))
    assert admission.is_full(is_batch=False)
    for number in range(2 * BATCH_QUEUE):
        assert not admission.is_full(is_batch=True)
        admission.enqueue(Waiting(f"b{number}", 0.0, is_batch=True))
    assert admission.is_full(is_batch=True)
    assert (admission.num_queued, admission.num_batch_queued) == (10, 8)


def test_each_class_has_its_own_patience() -> None:
    admission = with_worker()
    admission.enqueue(Waiting("a", 0.0))
    admission.enqueue(Waiting("b", 30.0))
    admission.enqueue(Waiting("batch", 0.0, is_batch=True))
    assert admission.expired(60.0) == []
    assert admission.expired(60.1) == [("a", "queue_delay")]
    assert admission.expired(90.1) == [("a", "queue_delay"), ("b", "queue_delay")]
    admission.dequeue("a")
    admission.dequeue("b")
    assert admission.expired(BATCH_DELAY_S) == []
    assert admission.expired(BATCH_DELAY_S + 0.1) == [("batch", "queue_delay")]


def test_a_full_queue_belongs_to_all_keys_where_the_order_is_fair() -> None:
    admission = with_worker(FAIR, max_queue=4)
    for name, key in (("g1", "greedy"), ("g2", "greedy"), ("m1", "modest"), ("g3", "greedy")):
        admission.enqueue(Waiting(name, 0.0, key=key, priority=DEFAULT_PRIORITY))
    admission.enqueue(Waiting("g0", 0.0, key="greedy"), returning=True)  # it has waited its time already
    assert admission.who_makes_way(Urgency(key="greedy")) is None
    assert admission.who_makes_way(Urgency(key="modest")) == "g3"  # two would be fewer than three
    assert admission.who_makes_way(Urgency(key="new")) == "g3"
    assert admission.who_makes_way(Urgency(key="new", is_batch=True)) is None
    admission.dequeue("g3")
    assert admission.who_makes_way(Urgency(key="modest")) is None  # one each and one more
    assert admission.who_makes_way(Urgency(key="new")) == "g2"
    assert with_worker(PRIORITY).who_makes_way(Urgency(key="new")) is None


def test_a_full_queue_keeps_out_no_higher_class() -> None:
    admission = with_worker(PRIORITY, max_queue=3)
    for name, priority in (("low1", 4), ("low2", 4), ("usual", DEFAULT_PRIORITY)):
        admission.enqueue(Waiting(name, 0.0, priority=priority))
    assert admission.who_makes_way(Urgency(priority=DEFAULT_PRIORITY)) == "low2"
    assert admission.who_makes_way(Urgency(priority=4)) is None
    admission.dequeue("low1")
    admission.dequeue("low2")
    assert admission.who_makes_way(Urgency(priority=0)) == "usual"
    assert admission.who_makes_way(Urgency(priority=DEFAULT_PRIORITY)) is None
    assert admission.who_makes_way(Urgency(priority=3)) is None


# ---- what is to be expected ------------------------------------------------------------------------------------------


def test_places_and_starts() -> None:
    admission = with_worker(PRIORITY)
    admission.enqueue(Waiting("a", 10.0, priority=2))
    admission.enqueue(Waiting("b", 10.0, priority=2))
    assert admission.place("a", 10.0) == Place(1, None)
    assert admission.place("b", 10.0) == Place(2, None)
    assert admission.place("x", 10.0) is None
    released(admission, 10.5, 11.0, 11.5, 12.0)  # two a second
    assert admission.place("b", 12.0) == Place(2, 1.0)
    admission.enqueue(Waiting("urgent", 12.0, priority=0))
    assert admission.place("urgent", 12.0) == Place(1, 0.5)
    assert admission.place("b", 12.0) == Place(3, 1.5)
    admission.dequeue("b")
    assert admission.place("b", 12.0) is None


def test_the_rate_is_that_of_a_queue_that_waits() -> None:
    """A minute of idling before a burst says nothing of how fast the workers are."""
    admission = with_worker()
    released(admission, 1.0, 31.0)
    admission.enqueue(Waiting("a", 60.0))
    released(admission, 60.1, 60.2)
    assert admission.place("a", 60.2) == Place(1, None)  # two releases are no rate
    released(admission, 60.3)
    place = admission.place("a", 60.3)
    assert place is not None
    assert place.start_s == pytest.approx(0.1)
    # Old ones count no more: five in the last ten seconds.
    released(admission, *(70.0 + n for n in range(5)))
    place = admission.place("a", 75.0)
    assert place is not None
    assert place.start_s == pytest.approx(2.0)


def test_a_slow_queue_moves_as_fast_as_its_last_few_places_came_free() -> None:
    admission = with_worker()
    admission.enqueue(Waiting("a", 0.0))
    released(admission, 8.0, 16.0)
    assert admission.place("a", 20.0) == Place(1, None)
    released(admission, 24.0)
    assert admission.place("a", 24.5) == Place(1, pytest.approx(24.5 / 3))
    released(admission, 36.0)
    assert admission.place("a", 40.0) == Place(1, pytest.approx(32 / 3))  # three since 8.0
    assert admission.retry_after(40.0) == 22  # two places


def test_retry_after_follows_the_rate_of_releases() -> None:
    admission = with_worker(max_queue=100)
    released(admission, *(0.5 * number for number in range(20)))  # two a second over the last ten seconds
    assert admission.retry_after(10.0) == 1
    for number in range(9):
        admission.enqueue(Waiting(f"waiting-{number}", 10.0))
    assert admission.retry_after(10.0) == 5  # ten requests at two a second
    assert admission.retry_after(100.0) == 10  # none: nobody knows
    admission = with_worker(max_queue=100)
    released(admission, 9.0, 9.5, 10.0)
    for number in range(9):
        admission.enqueue(Waiting(f"waiting-{number}", 10.0))
    assert admission.retry_after(18.5) == 34  # three releases in the last ten seconds: 10 / 0.3
    admission.enqueue(Waiting("batch", 1000.0, is_batch=True))
    released(admission, *(1000.0 + n for n in range(1, 11)))  # one a second
    assert admission.retry_after(1010.0) == 10  # interactive ones do not wait for batch
    assert admission.retry_after(1010.0, is_batch=True) == 11
    released(admission, 1009.5)
    for number in range(1000):
        admission.enqueue(Waiting(f"more-{number}", 1010.0))
    assert admission.retry_after(1010.0) == 60


def test_those_refused_together_come_back_one_after_the_other() -> None:
    admission = with_worker(max_queue=100)
    released(admission, *(0.5 * number for number in range(1, 21)))  # two a second
    admission.enqueue(Waiting("a", 10.0))
    assert [admission.retry_after(10.0) for _ in range(7)] == [1, 2, 2, 3, 3, 4, 4]
    assert admission.retry_after(10.0, is_batch=True) == 1, "batch has promises of its own"
    assert admission.retry_after(12.0) == 3, "the next one is at 14.5, whenever it is refused"
    assert admission.retry_after(30.0) == 10, "old promises are over"


def test_no_promise_is_later_than_the_longest() -> None:
    admission = with_worker(max_queue=100)
    released(admission, *(float(number) for number in range(1, 11)))  # one a second
    told = [admission.retry_after(10.0) for _ in range(130)]
    assert told[:60] == list(range(1, 61))
    assert told[60:120] == list(range(1, 61)), "then from the beginning: nobody is told more, and no second has many"


def test_without_a_rate_those_in_flight_are_taken_to_end_one_by_one() -> None:
    admission = with_worker()
    for number in range(5):
        admission.credits.take(f"{number}", D0, Ask(1, 0, 1), 0.0)
    assert [admission.retry_after(100.0) for _ in range(4)] == [10, 12, 14, 16]


# ---- early ends ------------------------------------------------------------------------------------------------------


def test_a_deadline_is_met_at_the_last_look_before_it() -> None:
    admission = with_worker(target_s=0.5)
    admission.enqueue(Waiting("a", 10.0))
    admission.enqueue(Waiting("batch", 10.0, is_batch=True))
    admission.enqueue(Waiting("back", 10.0), returning=True)
    assert admission.expired(10.5 - 2 * TICK_INTERVAL_S) == []
    assert admission.expired(10.5 - 2 * TICK_INTERVAL_S + 0.001) == [("a", "deadline")]
    assert admission.expired(60.0) == [("a", "deadline")]
    assert "500 ms target" in admission.deadline_text(3)
    assert "3 s" in admission.deadline_text(3)


def test_the_shorter_of_target_and_delay_counts() -> None:
    admission = with_worker(target_s=5.0, delay_s=1.0)
    admission.enqueue(Waiting("a", 0.0))
    assert admission.expired(1.1) == [("a", "queue_delay")]


def test_a_short_target_leaves_half_of_it() -> None:
    admission = with_worker(target_s=0.04)
    admission.enqueue(Waiting("a", 0.0))
    assert admission.expired(0.02) == []
    assert admission.expired(0.021) == [("a", "deadline")]


def test_hopeless_when_its_place_is_too_far_back() -> None:
    admission = with_worker(target_s=1.0)
    admission.enqueue(Waiting("first", 0.0))
    released(admission, 0.1, 0.2, 0.3, 0.4)  # ten a second
    for number in range(2, 11):
        admission.enqueue(Waiting(f"{number}", 0.4))
        assert not admission.is_hopeless(f"{number}", 0.4)
    admission.enqueue(Waiting("11", 0.4))
    assert admission.is_hopeless("11", 0.4)  # 1.1 s
    admission.enqueue(Waiting("batch", 0.4, is_batch=True))
    assert not admission.is_hopeless("batch", 0.4)
    admission.enqueue(Waiting("back", 0.4), returning=True)
    assert not admission.is_hopeless("back", 0.4)
    assert not admission.is_hopeless("not waiting", 0.4)


def test_slow_batch_answers_say_nothing_of_how_long_interactive_ones_wait() -> None:
    """Batch has waited all the time, and a batch answer ended every two seconds: that is not the rate of a burst."""
    admission = with_worker(max_queue=100, target_s=1.0)
    admission.enqueue(Waiting("batch", 0.0, is_batch=True))
    released(admission, *(2.0 * number for number in range(1, 11)))
    admission.enqueue(Waiting("first", 20.0))
    assert not admission.is_hopeless("first", 20.0)
    assert admission.place("first", 20.0) == Place(1, None)
    assert admission.place("batch", 20.0) == Place(2, 2 / 0.5)
    released(admission, 20.1, 20.2, 20.3, 20.4)
    assert admission.place("first", 20.4) == Place(1, pytest.approx(0.1))
    admission.dequeue("first")
    assert admission.place("batch", 21.0) == Place(1, pytest.approx(1 / 0.9))  # nine in ten seconds


def test_a_high_class_is_not_hopeless_behind_a_long_low_one() -> None:
    admission = with_worker(PRIORITY, target_s=1.0)
    for number in range(30):
        admission.enqueue(Waiting(f"{number}", 0.0, priority=2))
    released(admission, 0.1, 0.2, 0.3, 0.4)
    admission.enqueue(Waiting("high", 0.4, priority=0))
    admission.enqueue(Waiting("low", 0.4, priority=2))
    assert not admission.is_hopeless("high", 0.4)
    assert admission.is_hopeless("low", 0.4)


def test_nobody_is_hopeless_without_a_rate_or_a_target() -> None:
    admission = with_worker(target_s=0.001)
    admission.enqueue(Waiting("a", 0.0))
    assert not admission.is_hopeless("a", 10.0)
    admission = with_worker()
    admission.enqueue(Waiting("a", 0.0))
    released(admission, 1.0, 2.0, 3.0)
    assert not admission.is_hopeless("a", 10.0)


@pytest.mark.parametrize(
    ("waited_s", "wait_s", "own_s", "too_late"),
    [
        (0.0, 0.0, 0.1, False),
        (0.3, 0.1, 0.1, False),  # 0.4 of 0.5 - 0.1
        (0.31, 0.1, 0.1, True),
        (0.0, 0.41, 0.1, True),
        (0.0, 0.0, 9.0, False),  # longer than the target even alone: a quarter of it may be waited
        (0.1, 0.02, 9.0, False),
        (0.1, 0.03, 9.0, True),
    ],
)
def test_too_late_at_its_turn(waited_s: float, wait_s: float, own_s: float, too_late: bool) -> None:
    assert with_worker(target_s=0.5).is_too_late(waited_s, wait_s, own_s) is too_late
    assert not with_worker().is_too_late(waited_s, wait_s, own_s)


def test_what_predictions_missed_by_is_kept_free() -> None:
    admission = with_worker(target_s=0.5)
    for _ in range(9):
        admission.first_token(0.2, 0.2)
    admission.first_token(0.2, 9.0)  # one of ten may be anything
    assert not admission.is_too_late(0.4, 0.0, 0.1)
    for _ in range(64):
        admission.first_token(0.2, 0.25)
    assert not admission.is_too_late(0.34, 0.0, 0.1)  # 0.5 - 0.1 - 0.05
    assert admission.is_too_late(0.36, 0.0, 0.1)
    for _ in range(64):
        admission.first_token(0.2, 0.1)  # sooner than predicted: nothing to forgive
    assert not admission.is_too_late(0.399, 0.0, 0.1)
    assert admission.is_too_late(0.401, 0.0, 0.1)
    for _ in range(64):
        admission.first_token(0.1, 5.0)  # half of the target at most
    assert not admission.is_too_late(0.149, 0.0, 0.1)
    assert admission.is_too_late(0.151, 0.0, 0.1)


def test_stuck_is_a_quarter_of_the_target() -> None:
    admission = with_worker(target_s=0.4)
    assert not admission.is_stuck(0.1)
    assert admission.is_stuck(0.11)
    assert not with_worker().is_stuck(1000.0)


def test_the_wait_for_credit_of_one_that_comes_now() -> None:
    admission = with_worker(max_queue=100)
    assert admission.queue_s(5.0) == 0.0
    admission.enqueue(Waiting("batch", 5.0, is_batch=True))
    assert admission.queue_s(6.0) == 0.0, "batch requests delay nobody"
    for number in range(6):
        admission.enqueue(Waiting(str(number), 6.0))
    assert admission.queue_s(7.0) == pytest.approx(1.0), "nothing is known but for how long one of them has waited"
    released(admission, 7.0, 8.0, 9.0)
    assert admission.queue_s(9.0) == pytest.approx(6 / (3 / 3))
