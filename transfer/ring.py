"""The two views of a staging ring: slots are credits, and each use of a slot has a generation. Pure.

    sender    take() gives (slot, g) -> fill it -> KVPiece(slot, g)      KVCredit(slot, g + 1) -> free again, as g + 1
    receiver                                       is g due? -> is it here? copy out -> KVCredit(slot, g + 1)

A message about any other generation of the slot is late, repeated or invented, and is refused. A ring belongs to one
(sender incarnation, receiver incarnation) pair and is dropped with either, so generations start at 0.
"""

from collections import deque

from ..core.errors import LocalProtocolError, RemoteProtocolError


class SenderRing:
    def __init__(self, num_slots: int) -> None:
        self._generations = [0] * num_slots
        self._free = deque(range(num_slots))
        self._taken_at: dict[int, float] = {}  # slot |-> when it was written; oldest first

    @property
    def num_in_use(self) -> int:
        return len(self._taken_at)

    @property
    def oldest_taken_at(self) -> float | None:
        """When the slot was taken that has waited longest for its credit."""
        return next(iter(self._taken_at.values()), None)

    def take(self, now: float) -> tuple[int, int] | None:
        """A free slot and its generation; None while all are out."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._taken_at[slot] = now
        return slot, self._generations[slot]

    def put_back(self, slot: int) -> None:
        """Free a slot that was taken but never published. Raises LocalProtocolError when it is not taken."""
        if slot not in self._taken_at:
            raise LocalProtocolError(f"slot {slot} is not taken")
        del self._taken_at[slot]
        self._free.appendleft(slot)

    def credit(self, slot: int, generation: int) -> None:
        """The receiver gave the slot back, to be used as `generation`. Raises RemoteProtocolError when none is due."""
        if slot not in self._taken_at or generation != self._generations[slot] + 1:
            raise RemoteProtocolError(f"a credit for slot {slot}, generation {generation}, that is not due")
        del self._taken_at[slot]
        self._generations[slot] = generation
        self._free.append(slot)


class ReceiverRing:
    def __init__(self, num_slots: int) -> None:
        self._generations = [0] * num_slots
        self._announced: set[int] = set()  # published and not yet copied out

    @property
    def was_used(self) -> bool:
        return any(self._generations)

    def announced(self, slot: int, generation: int) -> None:
        """A piece was published. Raises RemoteProtocolError unless this slot's next use is the one as `generation`."""
        due = 0 <= slot < len(self._generations) and slot not in self._announced
        if not due or generation != self._generations[slot]:
            raise RemoteProtocolError(f"a piece in slot {slot}, generation {generation}, that is not due")
        self._announced.add(slot)

    def release(self, slot: int) -> int:
        """The slot has been copied out: the generation the sender may use it as next."""
        self._announced.remove(slot)
        self._generations[slot] += 1
        return self._generations[slot]
