"""Upload: many small arrays to the device in one asynchronous copy from pinned memory.

The host fills one of two buffers while the copy out of the other may still run. The device has one buffer: a copy into
it waits, in the stream's order, for the step that reads what was there before.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .launched import Event, record_event

# Kernels are compiled apart for pointers that are not multiples of 16.
_ALIGNMENT = 16
_TORCH_DTYPES = {np.int64: torch.int64, np.int32: torch.int32, np.float64: torch.float64}


class Field(NamedTuple):
    """One array of an upload."""

    name: str
    dtype: type[np.generic]  # np.int64, np.int32 or np.float64
    shape: tuple[int, ...]


class Packing:
    """Where the arrays of one upload lie in its buffer, one behind the other."""

    def __init__(self, fields: Sequence[Field]):
        self._places: list[tuple[Field, int, int]] = []  # field, first byte, byte behind it
        self.num_bytes = 0
        for field in fields:
            size = int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize
            self._places.append((field, self.num_bytes, self.num_bytes + size))
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def arrays(self, buffer: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        return {f.name: buffer[first:last].view(f.dtype).reshape(f.shape) for f, first, last in self._places}

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            f.name: buffer[first:last].view(_TORCH_DTYPES[f.dtype]).view(f.shape) for f, first, last in self._places
        }


class Upload:
    """Buffers for packings of up to `num_bytes`; larger ones make them grow, which moves the device's."""

    def __init__(self, device: torch.device, num_bytes: int):
        self._device = device
        self._turn = 0
        self._allocate(num_bytes)

    def send(self, packing: Packing, values: Mapping[str, Any]) -> Tensor:
        """Copy `values`, an array or number for each field, to the device; returns the device's buffer, uint8.

        What it holds is valid on the current stream until the next `send`.
        """
        size = packing.num_bytes
        if size > len(self.buffer):
            self._allocate(max(size, 2 * len(self.buffer)))
        host, host_tensor = self._hosts[self._turn]
        self._copied[self._turn].synchronize()
        for name, array in packing.arrays(host).items():
            _fill(array, values[name])
        self.buffer[:size].copy_(host_tensor[:size], non_blocking=True)
        self._copied[self._turn] = record_event(self._device)
        self._turn = 1 - self._turn
        return self.buffer

    def _allocate(self, num_bytes: int) -> None:
        """Copies on their way keep their memory: torch's allocators wait for the stream before they reuse it."""
        pinned = self._device.type == "cuda"
        size = max(num_bytes, _ALIGNMENT)
        hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._hosts = [(host.numpy(), host) for host in hosts]
        self._copied: list[Event] = [record_event(self._device)] * 2
        self.buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)


def _fill(array: NDArray[Any], value: Any) -> None:
    """A list of arrays fills the rows, each from its start; what a row has beyond is left as it is."""
    if array.size == 0:
        return
    if isinstance(value, list) and isinstance(value[0], np.ndarray):
        for row, part in zip(array, value, strict=True):
            row[: len(part)] = part
    else:
        array[...] = value
