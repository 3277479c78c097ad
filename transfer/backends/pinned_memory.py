"""Pieces in a file both workers map, as in shared_memory.py, with both mappings known to the CUDA driver.

Cards copy to and from it without a bounce buffer. For GPUs of one host that cannot map each other's memory.
"""

import ctypes
from typing import Any

import torch

from ...core.errors import ConfigurationError, RemoteProtocolError
from .shared_memory import SharedMemoryReceiver, SharedMemorySender


class PinnedMemorySender(SharedMemorySender):
    """Raises RemoteProtocolError as SharedMemorySender, and when the memory cannot be registered."""

    transport = "pinned_memory"

    def __init__(self, run_dir: str, name: str, num_slots: int, slot_bytes: int) -> None:
        super().__init__(run_dir, name, num_slots, slot_bytes)
        try:
            self._pinned = PinnedView(self._memory)
        except ConfigurationError as error:
            super().close()
            raise RemoteProtocolError(str(error)) from error

    def close(self) -> None:
        self._pinned.release()
        super().close()


class PinnedMemoryReceiver(SharedMemoryReceiver):
    """Raises ConfigurationError as SharedMemoryReceiver, and when the memory cannot be registered.

    Both the ring and the private copy of a piece are registered: the card reads the copy.
    """

    transport = "pinned_memory"

    def __init__(self, run_dir: str, num_slots: int, slot_bytes: int) -> None:
        super().__init__(run_dir, num_slots, slot_bytes)
        self._pinned: list[PinnedView] = []
        try:
            for memory in (self._memory, self._copy):
                self._pinned.append(PinnedView(memory))
        except ConfigurationError:
            self.close()
            raise

    def close(self) -> None:
        for view in self._pinned:
            view.release()
        super().close()


class PinnedView:
    """Memory registered with CUDA for as long as this lives. Raises ConfigurationError when it cannot be."""

    def __init__(self, memory: memoryview) -> None:
        try:
            self._runtime = cuda_runtime()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigurationError(f"host memory cannot be pinned, torch cannot use the card: {reason}") from error
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        code = int(self._runtime.cudaHostRegister(self._address, memory.nbytes, 0))
        if code != 0:
            raise ConfigurationError(
                f"{memory.nbytes / 2**20:.0f} MiB of host memory cannot be pinned (CUDA error {code}); raise the limit "
                "of locked memory (ulimit -l), or use --transport shared_memory"
            )

    def release(self) -> None:
        self._runtime.cudaHostUnregister(self._address)


def cuda_runtime() -> Any:
    """torch's CUDA runtime."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
