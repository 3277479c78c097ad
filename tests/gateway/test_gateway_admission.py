"""Credits, the queue and Retry-After, by literals; and a model that counts along."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import LocalProtocolError
from baton.core.messages import NodeRef
from baton.gateway.admission import EXPECTED_GROWTH, Admission

D0, D1 = NodeRef("decode-0", 1), NodeRef("decode-1", 1)


def with_worker(num_blocks: int = 64, max_running: int = 8, block_size: int = 16) -> Admission:
    admission = Admission(max_queue=2, max_queue_delay_s=60.0)
    admission.add_worker(D0, block_size=block_size, num_blocks=num_blocks, max_running=max_running)
    return admission


def test_blocks_cover_prompt_and_expected_growth() -> None:
    admission = with_worker(num_blocks=10)
    assert admission.with_credit(159, 1) == [D0]  # 160 tokens, 10 blocks
    assert admission.with_credit(160, 1) == []
    assert admission.with_credit(100, 60) == [D0]
    assert admission.with_credit(100, 61) == []


def test_growth_is_bounded() -> None:
    admission = with_worker(num_blocks=(EXPECTED_GROWTH + 16) // 16)
    assert admission.with_credit(16, 100_000) == [D0]
    assert admission.with_credit(17, 100_000) == []


def test_growing_requests_are_not_admitted_all_at_once() -> None:
    """Pool of 64 blocks of one token; four requests of 10 that may grow by 30: one at a time has 40."""
    admission = with_worker(num_blocks=64, block_size=1)
    admission.take("a", D0, 10, 30)
    assert admission.with_credit(10, 30) == []
    admission.release("a", 1.0)
    assert admission.with_credit(10, 30) == [D0]


def test_max_running() -> None:
    admission = with_worker(max_running=2)
    admission.take("a", D0, 1, 1)
    admission.take("b", D0, 1, 1)
    assert admission.with_credit(1, 1) == []
    with pytest.raises(LocalProtocolError):
        admission.take("c", D0, 1, 1)


def test_credit_is_given_back_exactly_once() -> None:
    admission = with_worker()
    admission.take("a", D0, 1, 1)
    with pytest.raises(LocalProtocolError):
        admission.take("a", D0, 1, 1)
    admission.release("a", 0.0)
    with pytest.raises(LocalProtocolError):
        admission.release("a", 0.0)


def test_a_worker_that_left_takes_its_credit_along() -> None:
    admission = with_worker()
    admission.add_worker(D1, block_size=16, num_blocks=4, max_running=1)
    admission.take("a", D1, 1, 1)
    admission.remove_worker(D1)
    assert admission.with_credit(1, 1) == [D0]
    admission.release("a", 0.0)
    assert admission.num_in_flight == 0


def test_the_queue_is_first_come_first_served() -> None:
    admission = with_worker()
    for request_id in ("a", "b"):
        assert not admission.is_full
        admission.enqueue(request_id, 0.0)
    assert admission.is_full
    assert admission.head == "a"
    admission.enqueue("resumed", 0.0, first=True)
    assert admission.head == "resumed"
    admission.dequeue("resumed")
    admission.dequeue("a")
    admission.dequeue("a")
    assert admission.head == "b"


def test_waiting_is_bounded() -> None:
    admission = with_worker()
    admission.enqueue("a", 0.0)
    admission.enqueue("b", 30.0)
    assert admission.expired(60.0) == []
    assert admission.expired(60.1) == ["a"]
    assert admission.expired(90.1) == ["a", "b"]


def test_retry_after_follows_the_rate_of_releases() -> None:
    admission = with_worker()
    for number in range(20):  # two a second over the last ten seconds
        admission.take(str(number), D0, 1, 1)
        admission.release(str(number), number * 0.5)
    assert admission.retry_after(10.0) == 1
    for number in range(9):
        admission.enqueue(f"waiting-{number}", 10.0)
    assert admission.retry_after(10.0) == 5  # ten requests at two a second
    assert admission.retry_after(18.5) == 34  # three releases in the last ten seconds: 10 / 0.3
    assert admission.retry_after(1000.0) == 10  # none: nobody knows


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 400), st.booleans()), max_size=40))
def test_the_pool_is_never_promised_twice(steps: list[tuple[int, int, bool]]) -> None:
    admission = with_worker(num_blocks=50, max_running=5)
    held: dict[str, int] = {}
    for number, (num_tokens, max_tokens, release) in enumerate(steps):
        if release and held:
            admission.release(held.popitem()[0], 0.0)
            continue
        blocks = -(-(num_tokens + min(max_tokens, EXPECTED_GROWTH)) // 16)
        fits = len(held) < 5 and sum(held.values()) + blocks <= 50
        assert admission.with_credit(num_tokens, max_tokens) == ([D0] if fits else [])
        if fits:
            admission.take(str(number), D0, num_tokens, max_tokens)
            held[str(number)] = blocks
        assert admission.num_in_flight == len(held)
