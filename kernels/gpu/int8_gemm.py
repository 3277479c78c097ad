"""Weight-only int8 products: weights are read as int8, turned into x's dtype in registers, and scaled at the end.

The weight is the first operand, because only that one may come from registers on sm_90: a tile of the transposed
product, weight rows by rows of x, is computed. There is one tile for all N, and K is cut as in gemm.py, so a row has
the same bits in any batch. Decoding reads half the bytes of bfloat16; long prompts run below the rate of gemm.py,
since each tile of 64 rows converts the weight again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .cost import OpCost
from .gemm import (
    WANTED_PROGRAMS,
    LinearConfig,
    linear_constants,
    linear_shapes,
    num_programs,
    segments_of,
    sum_segments,
)
from .launching import compile_options, require, require_tensor
from .model_shapes import ModelShape
from .tile_product import TYPE_NAMES, TileConfig, check_linear, check_out, finish, tile_of


def int8_config(num_rows: int, in_features: int, out_features: int, dtype: torch.dtype) -> LinearConfig:
    """The launch for `x` `[num_rows, in_features]` of `dtype`: one tile, so bits do not depend on `num_rows`."""
    tile = TileConfig(64, 128, 64, num_warps=8, num_stages=5)
    if dtype == torch.float32:
        tile = TileConfig(32, 32, 32, num_warps=4, num_stages=3)
    num_segments, segment_steps = segments_of(in_features, out_features, tile)
    is_split = num_segments > 1 and num_programs(tile, num_rows, out_features) < WANTED_PROGRAMS
    return LinearConfig(tile, num_segments, segment_steps, is_split)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values `[M, K]` and fp32 scales `[M]`; `reference.quantize_int8` is the rule. Plain torch, any device."""
    require_tensor("weight", weight, (None, None))
    scale = weight.abs().amax(1).float() / 127
    quotient = weight.float() / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    return quotient.round_().clamp_(-127, 127).to(torch.int8), scale


def int8_linear(
    x: Tensor,
    weight_int8: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`(x @ weight_int8.T) * scale + bias`, `[N, M]`; each row has the same bits whatever N is and wherever it lies.

    `x` is `[N, K]` in a float dtype with any row stride, `weight_int8` `[M, K]` contiguous, `scale` `[M]` fp32. The
    integers are exact in x's dtype; sums are in fp32 and rounded once, to `out_dtype` (default: x's). Raises
    ValueError for what does not fit.
    """
    num_rows, in_features, out_features = check_linear(x, weight_int8, bias)
    require(weight_int8.dtype == torch.int8, f"weight_int8 is {weight_int8.dtype}")
    require_tensor("scale", scale, (out_features,), torch.float32)
    require(scale.is_contiguous() and scale.device == x.device, "scale must be contiguous and on x's device")
    out = check_out(out, (num_rows, out_features), out_dtype or x.dtype, x.device, out_dtype is not None)
    if num_rows == 0:
        return out
    config = int8_config(num_rows, in_features, out_features, x.dtype)
    tile, target = config.tile, out
    ends: tuple[Tensor | None, Tensor | None] = (scale, bias)
    if config.is_split:
        target = torch.empty((config.num_segments, num_rows, out_features), dtype=torch.float32, device=x.device)
        ends = (None, None)
    grid = (num_programs(tile, num_rows, out_features), config.num_segments if config.is_split else 1)
    sizes = (num_rows, in_features, out_features, x.stride(0), target.stride(-2))
    _int8_linear_kernel[grid](
        x, weight_int8, *ends, target, *sizes, config.segment_steps,
        **linear_constants(config, in_features), **compile_options(tile.num_warps, tile.num_stages),
    )  # fmt: skip
    if config.is_split:
        sum_segments(target, scale, bias, out)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _int8_linear_kernel(  # type: ignore[no-untyped-def]
    x, weight, scale, bias, out, num_rows, K, M, x_stride, out_stride, segment_steps,
    IS_SPLIT: tl.constexpr, NUM_SEGMENTS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # grid: [row tiles * column tiles, segments if IS_SPLIT else 1]
    row_tile, col_tile = tile_of(tl.program_id(0), num_rows, M, BLOCK_ROWS, BLOCK_COLS)
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = col_tile * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    ks = tl.arange(0, BLOCK_K)
    row_mask = rows < num_rows
    x_tile = x + rows.to(tl.int64)[None, :] * x_stride + ks[:, None]
    # Columns past the end read the last row of the weight again: their sums are not stored.
    weight_tile = weight + tl.minimum(cols, M - 1).to(tl.int64)[:, None] * K + ks[None, :]
    steps = tl.cdiv(K, BLOCK_K)
    if IS_SPLIT:
        segment = tl.program_id(1)
        out += segment.to(tl.int64) * num_rows * M
        first = segment * segment_steps
        last = tl.minimum(first + segment_steps, steps)
        total = _dot_range(weight_tile, x_tile, row_mask, ks, first, last, K, BLOCK_ROWS, BLOCK_COLS, BLOCK_K, EVEN_K)
    elif NUM_SEGMENTS == 1:
        total = _dot_range(weight_tile, x_tile, row_mask, ks, 0, steps, K, BLOCK_ROWS, BLOCK_COLS, BLOCK_K, EVEN_K)
    else:
        total = tl.zeros((BLOCK_COLS, BLOCK_ROWS), tl.float32)
        for first in range(0, steps, segment_steps):
            last = tl.minimum(first + segment_steps, steps)
            total += _dot_range(
                weight_tile, x_tile, row_mask, ks, first, last, K, BLOCK_ROWS, BLOCK_COLS, BLOCK_K, EVEN_K
            )
    col_mask = cols < M
    if scale is not None:
        factor = tl.load(scale + cols, mask=col_mask, other=0.0)[:, None]
        addend = None if bias is None else tl.load(bias + cols, mask=col_mask, other=0.0).to(tl.float32)[:, None]
        total = finish(total, factor, addend)
    out_tile = out + rows.to(tl.int64)[:, None] * out_stride + cols[None, :]
    tl.store(out_tile, tl.trans(total).to(out.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def _dot_range(  # type: ignore[no-untyped-def]
    weight_tile, x_tile, row_mask, ks, first_step, last_step, K,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Sum of the products of steps first_step to last_step. The tiles are pointers at K = 0: `[cols, BLOCK_K]` and
    `[BLOCK_K, rows]`."""
    weight_tile += first_step * BLOCK_K
    x_tile += first_step * BLOCK_K
    total = tl.zeros((BLOCK_COLS, BLOCK_ROWS), tl.float32)
    for step in range(first_step, last_step):
        if EVEN_K:
            weight = tl.load(weight_tile)
            x = tl.load(x_tile, mask=row_mask[None, :], other=0.0)
        else:
            inside = ks < K - step * BLOCK_K
            weight = tl.load(weight_tile, mask=inside[None, :], other=0)
            x = tl.load(x_tile, mask=inside[:, None] & row_mask[None, :], other=0.0)
        total = tl.dot(weight.to(x.dtype), x, total, input_precision="ieee")
        weight_tile += BLOCK_K
        x_tile += BLOCK_K
    return total


def int8_linear_cost(num_rows: int, in_features: int, out_features: int, item_size: int = 2) -> OpCost:
    """Weight (a byte each, and the scales), input and output each once; `item_size` of the activations."""
    num_bytes = in_features * out_features + 4 * out_features + num_rows * (in_features + out_features) * item_size
    return OpCost(num_bytes, 2 * num_rows * in_features * out_features)


def kernel_specs(shape: ModelShape, capability: int = 90, dtype: torch.dtype = torch.bfloat16) -> list[KernelSpec]:
    """Every launch of a model's dense products but lm_head, which stays in `dtype`: one row, a middling batch, many."""
    del capability  # one tile for all
    element = TYPE_NAMES[dtype]
    specs = []
    for name, (in_features, out_features) in linear_shapes(shape).items():
        if name == "lm_head":
            continue
        sizes = {"K": in_features, "M": out_features, "x_stride": in_features, "out_stride": out_features}
        for num_rows in (1, 256, 8192):
            config = int8_config(num_rows, in_features, out_features, dtype)
            ends = {} if config.is_split else {"scale": "*fp32"}
            pointers = {"x": f"*{element}", "weight": "*i8", "out": "*fp32" if config.is_split else f"*{element}"}
            specs.append(
                KernelSpec(
                    name=f"int8 {name}, {num_rows} rows",
                    function=_int8_linear_kernel,
                    arguments=pointers | ends | dict.fromkeys(("num_rows", *sizes, "segment_steps"), "i32"),
                    constants=linear_constants(config, in_features)
                    | {"bias": None}
                    | ({"scale": None} if config.is_split else {}),
                    num_warps=config.tile.num_warps,
                    num_stages=config.tile.num_stages,
                    aligned=tuple(name for name, size in sizes.items() if size % 16 == 0),
                    uses_tensor_cores=True,
                    is_memory_bound=num_rows == 1,
                )
            )
    return specs
