"""What a transport must offer: where a sender writes a piece and where its receiver reads it.

Which slot is whose turn is not decided here (ring.py), nor is anything published here (KVPiece does that).
"""

from typing import Protocol


class SenderBackend(Protocol):
    def write(self, slot: int, num_bytes: int) -> memoryview:
        """`num_bytes` writable bytes, to be filled before `payload_for` is called."""

    def payload_for(self, slot: int) -> bytearray | None:
        """The bytes just written when they must travel in the message's second frame; they are the socket's then."""

    def close(self) -> None: ...


class ReceiverBackend(Protocol):
    transport: str
    name: str  # RingOffer.ring_name

    def read(self, slot: int, num_bytes: int, payload: memoryview | None) -> memoryview:
        """The piece as a private copy that no other process can change, writable, valid until the next call.

        Raises RemoteProtocolError when it is not where it must be.
        """

    def close(self) -> None: ...
