"""Pieces in the second frame of the message itself: works between any two hosts. Slots exist only as credits."""

from ...core.errors import RemoteProtocolError
from .ring_backend import ReceiverBackend, SenderBackend


class TcpSender(SenderBackend):
    """Each piece gets fresh memory, which ZeroMQ sends from without a copy and frees."""

    transport = "tcp"

    def __init__(self) -> None:
        self._written: dict[int, bytearray] = {}

    def write(self, slot: int, num_bytes: int) -> memoryview:
        self._written[slot] = bytearray(num_bytes)
        return memoryview(self._written[slot])

    def payload_for(self, slot: int) -> bytearray | None:
        return self._written.pop(slot)

    def close(self) -> None:
        self._written.clear()


class TcpReceiver(ReceiverBackend):
    """The frame that arrived is private memory already."""

    transport = "tcp"

    def read(self, slot: int, num_bytes: int, payload: memoryview | None) -> memoryview:
        if payload is None or payload.nbytes != num_bytes:
            there = "no" if payload is None else str(payload.nbytes)
            raise RemoteProtocolError(f"a piece of {num_bytes} bytes came with {there} bytes")
        return payload

    def close(self) -> None:
        pass
