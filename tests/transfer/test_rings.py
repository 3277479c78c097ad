"""Rings: every slot has one owner at a time, and a message about any but its present use is refused."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.errors import LocalProtocolError, RemoteProtocolError
from baton.transfer.ring import ReceiverRing, SenderRing


def test_slots_are_credits() -> None:
    ring = SenderRing(2)
    assert (ring.take(1.0), ring.take(2.0), ring.take(3.0)) == ((0, 0), (1, 0), None)
    assert (ring.num_in_use, ring.oldest_taken_at) == (2, 1.0)
    ring.credit(0, 1)
    assert (ring.num_in_use, ring.oldest_taken_at) == (1, 2.0)
    assert ring.take(4.0) == (0, 1)
    ring.put_back(1)
    assert ring.take(5.0) == (1, 0)


@pytest.mark.parametrize(("slot", "generation"), [(0, 0), (0, 2), (1, 1), (-1, 1), (2, 1), (0, -1)])
def test_credits_that_are_not_due(slot: int, generation: int) -> None:
    ring = SenderRing(2)
    ring.take(0.0)
    with pytest.raises(RemoteProtocolError):
        ring.credit(slot, generation)
    assert ring.num_in_use == 1


def test_a_slot_that_was_not_taken_is_not_put_back() -> None:
    with pytest.raises(LocalProtocolError):
        SenderRing(2).put_back(0)


@pytest.mark.parametrize(("slot", "generation"), [(0, 0), (0, 2), (1, 1), (-1, 0), (2, 0), (0, -1)])
def test_pieces_that_are_not_due(slot: int, generation: int) -> None:
    ring = ReceiverRing(2)
    assert not ring.was_used
    ring.announced(0, 0)
    assert ring.release(0) == 1
    assert ring.was_used
    with pytest.raises(RemoteProtocolError):
        ring.announced(slot, generation)


def test_a_piece_that_is_announced_is_due_once() -> None:
    ring = ReceiverRing(2)
    ring.announced(1, 0)
    ring.announced(0, 0)
    for slot in (0, 1):
        with pytest.raises(RemoteProtocolError):
            ring.announced(slot, 0)
    assert not ring.was_used
    assert ring.release(1) == 1
    ring.announced(1, 1)


class RingPair(RuleBasedStateMachine):
    """Messages between the two ends come late, in any order and repeatedly; the model is what lies in each slot."""

    def __init__(self) -> None:
        super().__init__()
        self.sender, self.receiver = SenderRing(3), ReceiverRing(3)
        self.written: dict[int, int] = {}  # slot |-> number of the piece in it
        self.pieces: list[tuple[int, int, int]] = []  # (slot, generation, number), ever published
        self.credits: list[tuple[int, int]] = []  # ever sent
        self.read: list[int] = []
        self.num_published = 0
        self.num_freed = 0

    @rule()
    def write(self) -> None:
        taken = self.sender.take(float(self.num_published))
        if taken is None:
            assert self.num_published - self.num_freed == 3
            return
        self.num_published += 1
        self.written[taken[0]] = self.num_published
        self.pieces.append((*taken, self.num_published))

    @precondition(lambda self: self.pieces)
    @rule(data=st.data())
    def piece_arrives(self, data: st.DataObject) -> None:
        slot, generation, number = data.draw(st.sampled_from(self.pieces))
        try:
            self.receiver.announced(slot, generation)
        except RemoteProtocolError:
            assert number in self.read
            return
        assert self.written[slot] == number, "the slot was written again before it was read"
        self.read.append(number)
        self.credits.append((slot, self.receiver.release(slot)))

    @precondition(lambda self: self.credits)
    @rule(data=st.data())
    def credit_arrives(self, data: st.DataObject) -> None:
        slot, generation = data.draw(st.sampled_from(self.credits))
        before = self.sender.num_in_use
        try:
            self.sender.credit(slot, generation)
        except RemoteProtocolError:
            assert self.sender.num_in_use == before
            return
        self.num_freed += 1

    @invariant()
    def each_piece_is_read_once(self) -> None:
        assert len(set(self.read)) == len(self.read)
        assert self.sender.num_in_use == self.num_published - self.num_freed
        assert self.num_freed <= len(self.read)


TestRingPair = RingPair.TestCase
TestRingPair.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
