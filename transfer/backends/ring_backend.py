"""What a transport must offer: where a sender writes a piece and where its receiver reads it.

Which slot is whose turn is not decided here (ring.py), nor is anything published here (KVPiece does that). Most
transports have a piece in place when it is published; where its bytes follow, `has_arrived` says when they are there.
No call waits.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from ...core.errors import BatonError, RemoteProtocolError

DeviceBuffer = Tensor  # contiguous uint8, in the memory of a device
PieceBuffer = memoryview | DeviceBuffer
StoreEntry = tuple[str, bytes]  # what the ends of a group tell each other while it forms: GroupKey


class RingBroken(BatonError):
    """This ring carries nothing any more; the pair needs another one."""


class RingBackend(ABC):
    """What both ends have in common."""

    transport: str  # RingOffer.transport

    @property
    def num_bytes(self) -> int:
        """Staging memory this end holds, on whatever device, with what a library took for it."""
        return 0

    def check(self) -> None:  # noqa: B027  most rings cannot break
        """Raises RingBroken when the ring is of no use any more."""

    def take_entries(self) -> list[StoreEntry]:
        """What the other end must be told, once."""
        return []

    def entry_arrived(self, entry: StoreEntry) -> None:
        """The other end told something. Raises RemoteProtocolError when this transport has no use for it."""
        raise RemoteProtocolError(f"a store entry for a ring over {self.transport}")

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; what is under way ends soon after."""

    def join(self, timeout_s: float) -> bool:
        """Wait for what `close` left to end; False when it has not."""
        return True


class SenderBackend(RingBackend):
    @abstractmethod
    def write(self, slot: int, num_bytes: int) -> PieceBuffer:
        """`num_bytes` writable bytes, to be filled before `payload_for` is called."""

    def payload_for(self, slot: int) -> bytearray | None:
        """The bytes just written when they must travel in the message's second frame; they are the socket's then."""
        return None

    def published(self, slot: int, num_bytes: int) -> None:
        """The piece in this slot has been announced: its bytes may follow."""


class ReceiverBackend(RingBackend):
    name: str = ""  # RingOffer.ring_name
    kept_for_sender: bool = False  # `close` must wait until the sender has closed its end, or is dead

    def announced(self, slot: int, num_bytes: int) -> None:
        """A piece in this slot was published. Raises RingBroken when it cannot be taken in."""

    def has_arrived(self, slot: int) -> bool:
        """Are the bytes of the announced piece there? Raises RingBroken when they will never be."""
        return True

    @abstractmethod
    def read(self, slot: int, num_bytes: int, payload: memoryview | None) -> PieceBuffer:
        """The piece as a private copy that no other process can change, valid until the next call or the slot's credit.

        Raises RemoteProtocolError when it is not where it must be.
        """
