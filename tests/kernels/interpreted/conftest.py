"""Fixtures of the kernels' tests under the interpreter."""

import mmap
from collections.abc import Callable

import pytest
import torch

_MAP_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.12 on


@pytest.fixture
def sparse_buffer() -> Callable[[int, torch.dtype], torch.Tensor]:
    """`sparse_buffer(num_elements, dtype)`: zeros that take memory only where they are touched, so that offsets past
    2^31 elements can be tested."""

    def allocate(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        return torch.frombuffer(mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags), dtype=dtype)

    return allocate
