"""Pieces in a file both workers map, as in shared_memory.py, with both mappings known to the CUDA driver.

Cards copy to and from it without a bounce buffer. For GPUs of one host that cannot map each other's memory.
"""

import ctypes

from ...core.errors import ConfigurationError, RemoteProtocolError
from .cuda_device import CudaDevice, CudaError
from .shared_memory import SharedMemoryReceiver, SharedMemorySender


class PinnedMemorySender(SharedMemorySender):
    """Raises RemoteProtocolError as SharedMemorySender, and when the memory cannot be pinned."""

    transport = "pinned_memory"

    def __init__(self, device: CudaDevice, run_dir: str, name: str, num_slots: int, slot_bytes: int) -> None:
        super().__init__(run_dir, name, num_slots, slot_bytes)
        try:
            self._pinned = PinnedView(device, self._memory)
        except ConfigurationError as error:
            super().close()
            raise RemoteProtocolError(str(error)) from error

    def close(self) -> None:
        self._pinned.release()
        super().close()


class PinnedMemoryReceiver(SharedMemoryReceiver):
    """Raises ConfigurationError as SharedMemoryReceiver, and when the memory cannot be pinned.

    Both the ring and the private copy of a piece are pinned: the card reads the copy.
    """

    transport = "pinned_memory"

    def __init__(self, device: CudaDevice, run_dir: str, num_slots: int, slot_bytes: int) -> None:
        super().__init__(run_dir, num_slots, slot_bytes)
        self._pinned: list[PinnedView] = []
        try:
            for memory in (self._memory, self._copy):
                self._pinned.append(PinnedView(device, memory))
        except ConfigurationError:
            self.close()
            raise

    def close(self) -> None:
        for view in self._pinned:
            view.release()
        super().close()


class PinnedView:
    """Memory that is pinned for as long as this lives. Raises ConfigurationError when it cannot be."""

    def __init__(self, device: CudaDevice, memory: memoryview) -> None:
        self._device = device
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            device.pin(self._address, memory.nbytes)
        except CudaError as error:
            raise ConfigurationError(
                f"{memory.nbytes / 2**20:.0f} MiB of host memory cannot be pinned ({error}); raise the limit of locked "
                "memory (ulimit -l), or use --transport shared_memory"
            ) from error

    def release(self) -> None:
        self._device.unpin(self._address)
