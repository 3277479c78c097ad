"""Pieces in the receiver's own device memory, which the sender maps (CUDA IPC): one host, one card or two.

The sender gathers straight into the slot; the receiver copies it out, on its card, before it checks and scatters.
"""

import re

from ...core.errors import ConfigurationError, RemoteProtocolError
from .cuda_device import HANDLE_BYTES, CudaDevice, CudaError
from .ring_backend import PieceBuffer, ReceiverBackend, SenderBackend

_NAME = re.compile(rf"([0-9a-f]{{{2 * HANDLE_BYTES}}}):([A-Za-z0-9/-]{{0,64}})")  # handle, uuid of the card
ALIGNMENT = 256  # of slots, so that they are read and written in words of any size


class CudaIpcSender(SenderBackend):
    """Maps the memory a peer offered. Raises RemoteProtocolError when that cannot be, or is not on the peer's card."""

    transport = "cuda_ipc"

    def __init__(self, device: CudaDevice, name: str, peer_uuid: str, num_slots: int, slot_bytes: int) -> None:
        match = _NAME.fullmatch(name)
        if match is None or match[2] != peer_uuid:
            raise RemoteProtocolError("the offered ring is no handle of memory on the peer's card")
        self._device = device
        self._stride = _stride(slot_bytes)
        try:
            self._pointer = device.open(bytes.fromhex(match[1]))
        except CudaError as error:
            raise RemoteProtocolError(f"the offered ring cannot be mapped: {error}") from error
        try:
            self._memory = device.tensor(self._pointer, num_slots * self._stride)
        except CudaError as error:
            device.close(self._pointer)
            raise RemoteProtocolError(f"the offered ring cannot be used: {error}") from error

    def write(self, slot: int, num_bytes: int) -> PieceBuffer:
        start = slot * self._stride
        return self._memory[start : start + num_bytes]

    def close(self) -> None:
        del self._memory
        self._device.close(self._pointer)


class CudaIpcReceiver(ReceiverBackend):
    """Raises ConfigurationError when the card has no room, or does not share memory."""

    transport = "cuda_ipc"
    kept_for_sender = True  # freeing memory that another process still maps is undefined

    def __init__(self, device: CudaDevice, uuid: str, num_slots: int, slot_bytes: int) -> None:
        self._device = device
        self._stride = _stride(slot_bytes)
        size = num_slots * self._stride
        try:
            self._pointer = device.allocate(size)
        except CudaError as error:
            raise ConfigurationError(
                f"the card has no room for a staging ring of {size / 2**20:.0f} MiB ({error}); give the KV cache less"
            ) from error
        try:
            self.name = f"{device.export(self._pointer).hex()}:{uuid}"
            self._memory = device.tensor(self._pointer, size)
            self._copy = device.empty(slot_bytes)
        except CudaError as error:
            device.free(self._pointer)
            raise ConfigurationError(f"the card cannot share memory between processes: {error}") from error

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes + self._copy.nbytes

    def read(self, slot: int, num_bytes: int, payload: memoryview | None) -> PieceBuffer:
        start = slot * self._stride
        copy = self._copy[:num_bytes]
        self._device.copy(copy, self._memory[start : start + num_bytes])
        return copy

    def close(self) -> None:
        del self._memory
        self._device.free(self._pointer)


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // ALIGNMENT) * ALIGNMENT
