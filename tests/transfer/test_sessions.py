"""KVSender and KVReceiver by literals, and the receiver's ranges against a plain set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import LocalProtocolError, RemoteProtocolError
from baton.core.messages import KVCommit
from baton.core.timeline import Timeline
from baton.transfer.coverage import PieceRange
from baton.transfer.session import KVReceiver, KVSender, ReceiverPhase, SenderPhase

COMMIT = KVCommit("r", 10, 0, b"h", 1, Timeline(copy_ns=3))


def sender(**changes: object) -> KVSender:
    return KVSender("r", 10, 2, 0.0, 30.0)


def test_grant_before_computation() -> None:
    s = sender()
    s.granted(4, 77, 1.0)
    assert (s.phase, s.ring_id, s.next_range(10)) == (SenderPhase.SENDING, 77, None)
    s.computed(3, 2.0)
    assert s.next_range(10) is None  # the receiver has those
    s.computed(9, 2.0)
    assert [s.next_range(7), s.next_range(7), s.next_range(7)] == [(4, 7, 0, 2), (7, 9, 0, 2), None]
    s.computed(10, 2.0)
    assert not s.commit_due
    s.finished(COMMIT, 2.0)
    assert not s.commit_due
    assert s.next_range(7) == (9, 10, 0, 2)
    assert s.commit_due
    assert s.commit(Timeline(copy_ns=4)).timeline.copy_ns == 7
    s.committed()
    assert s.phase is SenderPhase.COMMITTED


def test_computation_before_grant() -> None:
    s = sender()
    s.computed(10, 1.0)
    s.finished(COMMIT, 1.0)
    assert (s.next_range(10), s.commit_due) == (None, False)
    s.granted(10, 77, 2.0)  # it has everything: only the hidden state is missing
    assert (s.next_range(10), s.commit_due) == (None, True)


def test_the_senders_own_faults() -> None:
    s = sender()
    s.computed(5, 0.0)
    for wrong in (4, 11, -1):
        with pytest.raises(LocalProtocolError):
            s.computed(wrong, 0.0)
    with pytest.raises(LocalProtocolError):
        s.finished(COMMIT, 0.0)
    with pytest.raises(LocalProtocolError):
        s.commit(Timeline())
    s.computed(10, 0.0)
    s.finished(COMMIT, 0.0)
    with pytest.raises(LocalProtocolError):
        s.finished(COMMIT, 0.0)
    s.failed()
    with pytest.raises(LocalProtocolError):
        s.failed()


@pytest.mark.parametrize("first_missing", [-1, 11])
def test_a_grant_out_of_range_is_the_peers_fault(first_missing: int) -> None:
    with pytest.raises(RemoteProtocolError):
        sender().granted(first_missing, 1, 0.0)


def test_a_second_grant_is_the_peers_fault_and_changes_nothing() -> None:
    s = sender()
    s.granted(4, 1, 0.0)
    with pytest.raises(RemoteProtocolError):
        s.granted(2, 2, 0.0)
    assert s.ring_id == 1


def test_the_sender_counts_only_the_time_it_waits_for_the_peer() -> None:
    s = sender()
    assert not s.expired(1000.0)  # it is the one who has not computed
    s.computed(10, 1000.0)
    assert not s.expired(2000.0)  # finish may still come
    s.finished(COMMIT, 2000.0)
    assert (s.expired(2030.0), s.expired(2030.1)) == (False, True)
    s.granted(0, 1, 2040.0)
    assert (s.expired(2070.0), s.expired(2070.1)) == (False, True)
    s.alive(2071.0)
    assert not s.expired(2101.0)
    assert s.next_range(20) == (0, 10, 0, 2)
    assert not s.expired(9999.0)  # nothing is waited for: the commit is due


def whole(start: int, stop: int) -> PieceRange:
    """Those tokens in all layers."""
    return PieceRange(start, stop, 0, 2)


def receiver(first_missing: int = 2) -> KVReceiver:
    return KVReceiver("r", first_missing, 10, 2, 0.0, 30.0)


def test_pieces_then_commit_and_commit_then_pieces() -> None:
    a = receiver()
    a.placed(whole(2, 7), 1.0)
    a.placed(whole(7, 10), 1.0)
    assert (a.phase, a.complete) == (ReceiverPhase.PLACED, False)
    a.committed(COMMIT, 1.0)
    assert (a.complete, a.commit, a.contiguous_tokens) == (True, COMMIT, 10)
    b = receiver()
    b.committed(COMMIT, 1.0)
    b.placed(whole(7, 10), 1.0)
    assert (b.phase, b.contiguous_tokens) == (ReceiverPhase.COMMITTED, 2)
    b.placed(whole(2, 7), 1.0)
    assert b.complete


def test_a_receiver_that_lacks_nothing_waits_for_the_commit_only() -> None:
    r = receiver(first_missing=10)
    with pytest.raises(RemoteProtocolError):
        r.placed(whole(9, 10), 1.0)
    r.committed(COMMIT, 1.0)
    assert r.complete


@pytest.mark.parametrize(("start", "stop"), [(1, 3), (9, 11), (5, 5), (6, 5), (-1, 3), (4, 6), (3, 8), (5, 6)])
def test_ranges_that_are_not_wanted(start: int, stop: int) -> None:
    r = receiver()
    r.placed(whole(4, 7), 0.0)
    for call in (lambda: r.check(whole(start, stop)), lambda: r.placed(whole(start, stop), 9.0)):
        with pytest.raises(RemoteProtocolError):
            call()


@pytest.mark.parametrize("changes", [{"num_tokens": 9}, {"request_id": "other"}])
def test_a_commit_of_something_else(changes: dict[str, object]) -> None:
    fields = {f: getattr(COMMIT, f) for f in COMMIT.__struct_fields__}
    with pytest.raises(RemoteProtocolError):
        receiver().committed(KVCommit(**{**fields, **changes}), 0.0)


def test_a_second_commit() -> None:
    r = receiver()
    r.committed(COMMIT, 0.0)
    with pytest.raises(RemoteProtocolError):
        r.committed(COMMIT, 0.0)


def test_every_sign_of_life_renews_the_receivers_lease() -> None:
    r = receiver()
    assert (r.expired(30.0), r.expired(30.1)) == (False, True)
    r.progress(20.0)
    assert (r.expired(50.0), r.expired(50.1)) == (False, True)
    r.placed(whole(2, 3), 40.0)
    assert (r.expired(70.0), r.expired(70.1)) == (False, True)
    r.committed(COMMIT, 60.0)
    assert (r.expired(90.0), r.expired(90.1)) == (False, True)
    r.placed(whole(3, 10), 61.0)
    assert not r.expired(9999.0)


def test_what_was_failed_takes_nothing() -> None:
    r = receiver()
    r.failed()
    assert not r.expired(9999.0)
    with pytest.raises(RemoteProtocolError):
        r.committed(COMMIT, 0.0)
    with pytest.raises(LocalProtocolError):
        KVReceiver("r", 11, 10, 2, 0.0, 30.0)


@given(st.lists(st.tuples(st.integers(-1, 12), st.integers(-1, 12)), max_size=30), st.integers(0, 10))
def test_ranges_against_a_set_of_tokens(ranges: list[tuple[int, int]], first_missing: int) -> None:
    r = KVReceiver("r", first_missing, 10, 2, 0.0, 30.0)
    have: set[int] = set()
    for start, stop in ranges:
        new = set(range(start, stop))
        if new and min(new) >= first_missing and max(new) < 10 and not new & have:
            r.placed(whole(start, stop), 0.0)
            have |= new
        else:
            with pytest.raises(RemoteProtocolError):
                r.placed(whole(start, stop), 0.0)
        contiguous = next(n for n in range(first_missing, 11) if n not in have)
        assert r.contiguous_tokens == contiguous
        assert (r.phase is ReceiverPhase.PLACED) == (contiguous == 10)
