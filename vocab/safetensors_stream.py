"""Writing a safetensors file tensor by tensor, so that a conversion never holds the whole model in memory.

Layout (the published safetensors format): the header's length as a little-endian u64, the header (JSON: name |->
dtype, shape, byte range after the header; padded with spaces to a multiple of 8), then the tensors without gaps.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

_DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2)}


class TensorSpec(NamedTuple):
    """Name, numpy dtype name and shape of a tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype][1]


def aligned_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Wider items first, then by name: so every tensor of the file starts at a multiple of its item size."""
    return sorted(specs, key=lambda spec: (-_DTYPES[spec.dtype][1], spec.name))


def write_safetensors(path: Path, specs: list[TensorSpec], tensors: Iterable[NDArray[np.generic]]) -> None:
    """Write `tensors`, which come in the order of `specs`, to `path`; ValueError when one is not as its spec."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.num_bytes
        header[spec.name] = {
            "dtype": _DTYPES[spec.dtype][0],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for spec, tensor in zip(specs, tensors, strict=True):
            if tensor.dtype.name != spec.dtype or tensor.shape != spec.shape:
                raise ValueError(f"{spec.name} is {tensor.dtype}{tensor.shape}, not {spec.dtype}{spec.shape}")
            file.write(np.ascontiguousarray(tensor).astype(tensor.dtype.newbyteorder("<"), copy=False).data)
