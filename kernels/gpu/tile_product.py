"""What the matrix products share: their tiles, the loop over K inside a tile, and the checks of their arguments.

Dense products, of float and of int8 weights, and those of experts multiply rows of x by a weight tile with
`dot_range`. An element of the result is the sum over K in steps of `block_k`, each step in the order of the tensor
core's instruction, whatever the tile's number of rows: rows are the instruction's first operand, so on sm_90 every
tile is made of `wgmma.m64n128k16`, on sm_80 of `mma.m16n8k16`, and on sm_100 all tiles have 128 rows and one shape of
tcgen05. `tests/kernels/test_compiled_gemm.py` reads that from the PTX.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import require, require_tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The tile of one program, and how it is compiled."""

    block_rows: int  # rows of x
    block_cols: int  # rows of the weight, columns of the output
    block_k: int
    num_warps: int
    num_stages: int


def tiles_for(dtype: torch.dtype, capability: int, *, one_segment: bool) -> tuple[TileConfig, ...]:
    """The tiles that give the same bits, fewest rows first. `one_segment`: no second accumulator is needed."""
    if dtype == torch.float32:
        return (TileConfig(32, 32, 32, num_warps=4, num_stages=3),)
    if capability == 100:
        return (TileConfig(128, 128, 64, num_warps=8, num_stages=4),)
    if capability == 80:
        return TileConfig(64, 64, 64, num_warps=4, num_stages=5), TileConfig(128, 128, 64, num_warps=8, num_stages=4)
    few, many = TileConfig(64, 128, 64, num_warps=4, num_stages=4), TileConfig(128, 128, 64, num_warps=8, num_stages=4)
    return (few, many, TileConfig(256, 128, 64, num_warps=8, num_stages=4)) if one_segment else (few, many)


def cdiv(dividend: int, divisor: int) -> int:
    """Division rounded up."""
    return -(-dividend // divisor)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, int, int]:
    """(N, K, M) of a product; raises ValueError for what does not fit."""
    require_tensor("x", x, (None, None), *FLOAT_DTYPES)
    num_rows, in_features = x.shape
    require(in_features > 0, "x has no columns")
    require_tensor("weight", weight, (None, in_features))
    require(weight.is_contiguous() and weight.shape[0] > 0, "weight must be contiguous, with at least one row")
    require(x.stride(1) == 1 or in_features == 1, "x's rows must be contiguous")
    require(weight.device == x.device, f"weight is on {weight.device}, x on {x.device}")
    if bias is not None:
        require_tensor("bias", bias, (weight.shape[0],), *FLOAT_DTYPES)
        require(bias.is_contiguous() and bias.device == x.device, "bias must be contiguous and on x's device")
    return num_rows, in_features, weight.shape[0]


def check_out(
    out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, is_dtype_fixed: bool = True
) -> Tensor:
    """`out` if it fits, else a new tensor; raises ValueError. `is_dtype_fixed`: a given out must have this dtype."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    require_tensor("out", out, shape, *((dtype,) if is_dtype_fixed else FLOAT_DTYPES))
    require(out.stride(1) == 1 or shape[1] == 1, "out's rows must be contiguous")
    require(out.device == device, f"out is on {out.device}, x on {device}")
    return out


@triton.jit
def tile_of(program, num_rows, num_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row tile, column tile) of a program: eight row tiles side by side, so that they find the weight in L2."""
    row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    per_group = 8 * tl.cdiv(num_cols, BLOCK_COLS)
    first_row_tile = program // per_group * 8
    group_rows = tl.minimum(row_tiles - first_row_tile, 8)
    within = program % per_group
    return first_row_tile + within % group_rows, within // group_rows


@triton.jit
def dot_range(  # type: ignore[no-untyped-def]
    x_tile, weight_tile, row_mask, ks, first_step, last_step, K,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Sum of the products of steps first_step to last_step. The tiles are pointers at K = 0: `[rows, BLOCK_K]` and
    `[BLOCK_K, cols]`. int8 weights are turned into x's dtype, in which they are exact, between their load and use."""
    x_tile += first_step * BLOCK_K
    weight_tile += first_step * BLOCK_K
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for step in range(first_step, last_step):
        if EVEN_K:
            x = tl.load(x_tile, mask=row_mask[:, None], other=0.0)
            weight = tl.load(weight_tile)
        else:
            inside = ks < K - step * BLOCK_K
            x = tl.load(x_tile, mask=row_mask[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_tile, mask=inside[:, None], other=0.0)
        total = tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")
        x_tile += BLOCK_K
        weight_tile += BLOCK_K
    return total


@triton.jit
def finish(total, factor, addend):  # type: ignore[no-untyped-def]
    """`total * factor + addend`, fused explicitly so that every kernel that ends a product rounds alike."""
    if factor is not None:
        if addend is not None:
            total = tl.fma(total, tl.broadcast_to(factor, total.shape), tl.broadcast_to(addend, total.shape))
        else:
            total *= factor
    elif addend is not None:
        total += addend
    return total


def tile_constants(tile: TileConfig, in_features: int) -> dict[str, Any]:
    """The tl.constexpr arguments that every kernel with such a tile has."""
    return {
        "EVEN_K": in_features % tile.block_k == 0,
        "BLOCK_ROWS": tile.block_rows,
        "BLOCK_COLS": tile.block_cols,
        "BLOCK_K": tile.block_k,
    }
