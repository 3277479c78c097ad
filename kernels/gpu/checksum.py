"""Integer checksum of a byte buffer on the device, for pieces of the KV cache that travel between GPUs."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.checksum import KEY_FACTORS, KEY_OFFSET, LENGTH_FACTOR
from .compiling import KernelSpec
from .cost import OpCost
from .launching import compile_options, require, require_tensor
from .model_shapes import ModelShape

_TILE_WORDS = 4096  # four 16-byte loads a thread
_MAX_PROGRAMS = 528  # 4 for each multiprocessor of an H200: 64 KiB in flight on each
_NUM_WARPS = 8


@triton.jit
def _word_keys(index, OFFSET: tl.constexpr, FACTOR_0: tl.constexpr, FACTOR_1: tl.constexpr):  # type: ignore[no-untyped-def]
    """`reference.word_keys` as uint64; `index` is int32."""
    key = (index.to(tl.uint32, bitcast=True) + OFFSET) * FACTOR_0
    key = (key ^ (key >> 16)) * FACTOR_1
    return (key ^ (key >> 15)).to(tl.uint64)


@triton.jit(do_not_specialize=["num_bytes"])
def _checksum(  # type: ignore[no-untyped-def]
    words_ptr,  # [num_bytes // 4] int32
    bytes_ptr,  # [num_bytes] uint8, the same memory
    partials_ptr,  # [num_programs] int64
    num_bytes,
    OFFSET: tl.constexpr,
    FACTOR_0: tl.constexpr,
    FACTOR_1: tl.constexpr,
    LENGTH_FACTOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program p sums the whole tiles p, p + num_programs, ...; the first one adds what is left, and the length."""
    program = tl.program_id(0)
    num_words = (num_bytes // 4).to(tl.int32)
    num_tiles = num_words // TILE
    lane = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.uint64)
    for tile in range(program, num_tiles, tl.num_programs(0)):  # whole tiles need no mask, which would narrow the loads
        index = tile * TILE + lane
        words = tl.load(words_ptr + index).to(tl.uint32, bitcast=True)
        total += words.to(tl.uint64) * _word_keys(index, OFFSET, FACTOR_0, FACTOR_1)
    if program == 0:
        index = num_tiles * TILE + lane
        words = tl.load(words_ptr + index, mask=index < num_words, other=0).to(tl.uint32, bitcast=True)
        total += words.to(tl.uint64) * _word_keys(index, OFFSET, FACTOR_0, FACTOR_1)
        place = tl.arange(0, 4)  # of up to three bytes of a last word
        position = num_bytes.to(tl.int64) // 4 * 4 + place
        last = tl.load(bytes_ptr + position, mask=position < num_bytes, other=0).to(tl.uint64) << (8 * place)
        last = last * _word_keys(num_words + place * 0, OFFSET, FACTOR_0, FACTOR_1)
        rest = tl.sum(last, 0).to(tl.int64, bitcast=True) + num_bytes.to(tl.int64) * LENGTH_FACTOR
        tl.store(partials_ptr, tl.sum(total, 0).to(tl.int64, bitcast=True) + rest)
    else:
        tl.store(partials_ptr + program, tl.sum(total, 0).to(tl.int64, bitcast=True))


def checksum_config() -> dict[str, Any]:
    """The constants of the kernel; a sum of integers may be split anyhow, so nothing depends on the device."""
    return {
        "OFFSET": KEY_OFFSET,
        "FACTOR_0": KEY_FACTORS[0],
        "FACTOR_1": KEY_FACTORS[1],
        "LENGTH_FACTOR": LENGTH_FACTOR,
        "TILE": _TILE_WORDS,
    }


def checksum(buffer: Tensor) -> Tensor:
    """`reference.checksum` of `buffer` `[n]` uint8, as an int64 scalar on its device; nothing is waited for.

    The buffer starts at a multiple of 4 bytes (of 16, to be read at the speed of memory) and has less than 8 GiB.
    """
    require_tensor("buffer", buffer, (None,), torch.uint8)
    num_bytes = buffer.numel()
    require(buffer.is_contiguous(), "buffer is not contiguous")
    require(buffer.data_ptr() % 4 == 0, "buffer does not start at a multiple of 4 bytes")
    require(num_bytes < 1 << 33, f"buffer has {num_bytes} bytes, less than 8 GiB can be told apart")
    num_programs = min(max(num_bytes // (4 * _TILE_WORDS), 1), _MAX_PROGRAMS)
    partials = torch.empty(num_programs, dtype=torch.int64, device=buffer.device)
    _checksum[(num_programs,)](
        triton.reinterpret(buffer, tl.int32),
        buffer,
        partials,
        num_bytes,
        **checksum_config(),
        **compile_options(_NUM_WARPS, 1),
    )
    return partials.sum()


def checksum_cost(num_bytes: int) -> OpCost:
    """The buffer read once; the integer operations are not what limits it."""
    return OpCost(num_bytes, 0)


def kernel_specs(shape: ModelShape) -> list[KernelSpec]:
    """The same for every model: bytes are bytes."""
    return [
        KernelSpec(
            name="checksum",
            function=_checksum,
            arguments={"words_ptr": "*i32", "bytes_ptr": "*u8", "partials_ptr": "*i64", "num_bytes": "i32"},
            constants=checksum_config(),
            num_warps=_NUM_WARPS,
            num_stages=1,
            is_memory_bound=True,
        )
    ]
