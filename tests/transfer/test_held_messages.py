"""Early messages: kept for a while, a bounded number, never for what is over."""

from baton.core.messages import KVAbort, KVGrant, NodeRef
from baton.transfer.held_messages import MAX_ENDED, MAX_HELD, HeldMessages

P, Q = NodeRef("p", 1), NodeRef("p", 2)


def test_what_is_held_comes_out_once_in_the_order_asked() -> None:
    held = HeldMessages(10.0)
    held.hold_unless_ended(("r", P), KVGrant("r", 1, 2), 0.0)
    held.hold_unless_ended(("r", P), KVGrant("r", 9, 9), 0.0)  # the first one counts
    held.hold_unless_ended(("r", P), KVAbort("r", "x"), 0.0)
    assert held.open(("r", Q), KVAbort, KVGrant) == []  # another life
    assert held.open(("r", P), KVAbort, KVGrant) == [KVAbort("r", "x"), KVGrant("r", 1, 2)]
    assert held.open(("r", P), KVAbort, KVGrant) == []
    assert len(held) == 0


def test_time_number_and_peer_bound_what_is_held() -> None:
    held = HeldMessages(10.0)
    held.hold_unless_ended(("old", P), KVAbort("old", ""), 0.0)
    held.hold_unless_ended(("new", P), KVAbort("new", ""), 5.0)
    held.expire(10.0)
    assert len(held) == 2
    held.expire(10.1)
    assert len(held) == 1
    for n in range(MAX_HELD):
        held.hold_unless_ended((str(n), Q), KVAbort("", ""), 6.0)
    assert len(held) == MAX_HELD
    assert held.open(("new", P), KVAbort) == []
    held.forget_peer(Q)
    assert len(held) == 0


def test_what_is_over_is_not_held_until_it_starts_again() -> None:
    held = HeldMessages(10.0)
    held.end(("r", P), succeeded=False)
    held.end(("s", P), succeeded=True)
    for request_id in ("r", "s"):
        held.hold_unless_ended((request_id, P), KVAbort("", ""), 0.0)
    assert len(held) == 0
    assert (held.has_failed(("r", P)), held.has_failed(("s", P)), held.has_failed(("t", P))) == (True, False, False)
    held.open(("r", P))
    assert not held.has_failed(("r", P))
    held.hold_unless_ended(("r", P), KVAbort("", ""), 0.0)
    assert len(held) == 1


def test_the_memory_of_what_is_over_is_bounded() -> None:
    held = HeldMessages(10.0)
    for n in range(MAX_ENDED + 1):
        held.end((str(n), P), succeeded=False)
    assert not held.has_failed(("0", P))
    assert held.has_failed(("1", P))
