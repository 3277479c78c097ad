"""Dense matrix products whose rows do not depend on each other's number or place: the same bits in any batch.

How one output element is computed depends on K, M, the dtypes and the chip only, never on N:

- K is cut into `num_segments` segments. Each is summed from zero by the tensor core, in steps of `block_k`, and the
  segments' sums are added to zero in order, in fp32; then bias, then rounding.
- With few rows a program has one segment of one tile, so that a small weight is read by enough programs at once,
  and a second kernel adds the segments. With many rows a program walks all segments of its tile itself. Both
  orders of work add the same numbers in the same order.
- Tiles of any number of rows multiply with the same instruction (see tile_product.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .cost import OpCost
from .launching import capability_of, compile_options, require
from .model_shapes import ModelShape
from .tile_product import (
    TYPE_NAMES,
    TileConfig,
    cdiv,
    check_linear,
    check_out,
    dot_range,
    finish,
    tile_constants,
    tile_of,
    tiles_for,
)

_WANTED_PROGRAMS = 120  # about one for each of the 132 SMs of an H200 (108 of an A100)
_MIN_SEGMENT = 256  # elements of K; a shorter segment costs more to add than it gains
_SUM_BLOCK = 128


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """One launch: its tile, the segments of K, and whether each program has one of them or all."""

    tile: TileConfig
    num_segments: int
    segment_steps: int  # steps of block_k in a segment; the last one may be shorter
    is_split: bool


def segments_of(in_features: int, out_features: int, tile: TileConfig, num_programs: int) -> tuple[int, int]:
    """(number of segments, steps in each) for a weight `[out_features, in_features]`: enough programs for one row."""
    steps = cdiv(in_features, tile.block_k)
    wanted = cdiv(num_programs, cdiv(out_features, tile.block_cols))
    segment_steps = max(cdiv(steps, wanted), _MIN_SEGMENT // tile.block_k)
    return cdiv(steps, segment_steps), segment_steps


def linear_config(
    num_rows: int, in_features: int, out_features: int, dtype: torch.dtype, capability: int, *, is_int8: bool = False
) -> LinearConfig:
    """The launch for `x` `[num_rows, in_features]` of `dtype`. Bits depend on all arguments but `num_rows`."""
    few = tiles_for(dtype, capability, one_segment=False)[0]
    # int8: half the bytes a step, so as many on their way need more steps; two programs an SM, so that one converts
    # its weight while the other multiplies.
    wanted = _WANTED_PROGRAMS * 2 if is_int8 else _WANTED_PROGRAMS
    num_segments, segment_steps = segments_of(in_features, out_features, few, wanted)
    if is_int8:
        few = replace(few, num_stages=few.num_stages + 2)
    tile = few
    for wider in tiles_for(dtype, capability, one_segment=num_segments == 1)[1:]:
        if num_rows > tile.block_rows and num_programs(wider, num_rows, out_features) >= _WANTED_PROGRAMS:
            tile = wider
    is_split = num_segments > 1 and num_programs(tile, num_rows, out_features) < _WANTED_PROGRAMS
    return LinearConfig(tile, num_segments, segment_steps, is_split)


def num_programs(tile: TileConfig, num_rows: int, out_features: int) -> int:
    """Tiles of an output `[num_rows, out_features]`."""
    return cdiv(num_rows, tile.block_rows) * cdiv(out_features, tile.block_cols)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, `[N, M]`; each row has the same bits whatever N is and wherever it lies.

    `x` is `[N, K]` with any row stride, `weight` `[M, K]` contiguous, as Hugging Face stores it, both of one float
    dtype; `bias` `[M]` may have another. Sums are in fp32 and rounded once, to `out_dtype` (default: x's).
    `out` is `[N, M]` with any row stride. Raises ValueError for what does not fit.
    """
    require(weight.dtype == x.dtype, f"weight is {weight.dtype}, x is {x.dtype}")
    return launch_linear(x, weight, None, bias, prepare_linear(x, weight, bias, out_dtype, out))


def prepare_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, out: Tensor | None
) -> Tensor:
    """The checked output of a product; raises ValueError for arguments that do not fit."""
    num_rows, _, out_features = check_linear(x, weight, bias)
    return check_out(out, (num_rows, out_features), out_dtype or x.dtype, x.device, out_dtype is not None)


def launch_linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, out: Tensor) -> Tensor:
    """`out = (x @ weight.T) * scale + bias` for checked arguments; `weight` is int8 where `scale` `[M]` is given."""
    num_rows, in_features, out_features = *x.shape, weight.shape[0]
    if num_rows == 0:
        return out
    is_int8 = scale is not None
    config = linear_config(num_rows, in_features, out_features, x.dtype, capability_of(x.device), is_int8=is_int8)
    tile, target = config.tile, out
    grid = (num_programs(tile, num_rows, out_features), config.num_segments if config.is_split else 1)
    if config.is_split:
        target = torch.empty((config.num_segments, num_rows, out_features), dtype=torch.float32, device=x.device)
    ends = (None, None) if config.is_split else (scale, bias)
    _linear_kernel[grid](
        x, weight, *ends, target, num_rows, in_features, out_features, x.stride(0), target.stride(-2),
        config.segment_steps, **_constants(config, in_features), **compile_options(tile.num_warps, tile.num_stages),
    )  # fmt: skip
    if config.is_split:
        sum_segments(target, scale, bias, out)
    return out


def sum_segments(partials: Tensor, scale: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
    """`out = (partials[0] + partials[1] + ...) * scale + bias`, added in this order; partials are `[S, N, M]` fp32."""
    num_segments, num_rows, out_features = partials.shape
    grid = (num_rows, cdiv(out_features, _SUM_BLOCK))
    _sum_segments_kernel[grid](
        partials, scale, bias, out, num_rows, out_features, out.stride(0),
        NUM_SEGMENTS=num_segments, BLOCK=_SUM_BLOCK, **compile_options(1, 1),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(  # type: ignore[no-untyped-def]
    x, weight, scale, bias, out, num_rows, K, M, x_stride, out_stride, segment_steps,
    ONE_SEGMENT: tl.constexpr, IS_SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # grid: [row tiles * column tiles, segments if IS_SPLIT else 1]
    row_tile, col_tile = tile_of(tl.program_id(0), num_rows, M, BLOCK_ROWS, BLOCK_COLS)
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = col_tile * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    ks = tl.arange(0, BLOCK_K)
    row_mask = rows < num_rows
    x_tile = x + rows.to(tl.int64)[:, None] * x_stride + ks[None, :]
    # Columns past the end read the last row of the weight again: their sums are not stored.
    weight_tile = weight + tl.minimum(cols, M - 1).to(tl.int64)[None, :] * K + ks[:, None]
    steps = tl.cdiv(K, BLOCK_K)
    if IS_SPLIT:
        segment = tl.program_id(1)
        out += segment.to(tl.int64) * num_rows * M
        first = segment * segment_steps
        last = tl.minimum(first + segment_steps, steps)
        total = dot_range(x_tile, weight_tile, row_mask, ks, first, last, K, BLOCK_ROWS, BLOCK_COLS, BLOCK_K, EVEN_K)
    elif ONE_SEGMENT:
        total = dot_range(x_tile, weight_tile, row_mask, ks, 0, steps, K, BLOCK_ROWS, BLOCK_COLS, BLOCK_K, EVEN_K)
    else:
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        for first in range(0, steps, segment_steps):
            last = tl.minimum(first + segment_steps, steps)
            total += dot_range(
                x_tile, weight_tile, row_mask, ks, first, last, K, BLOCK_ROWS, BLOCK_COLS, BLOCK_K, EVEN_K
            )
    col_mask = cols < M
    factor = None if scale is None else tl.load(scale + cols, mask=col_mask, other=0.0)[None, :]
    addend = None if bias is None else tl.load(bias + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    total = finish(total, factor, addend)
    out_tile = out + rows.to(tl.int64)[:, None] * out_stride + cols[None, :]
    tl.store(out_tile, total.to(out.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _sum_segments_kernel(  # type: ignore[no-untyped-def]
    partials, scale, bias, out, num_rows, M, out_stride, NUM_SEGMENTS: tl.constexpr, BLOCK: tl.constexpr
):
    # grid: [rows, blocks of columns]
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < M
    total = tl.zeros((BLOCK,), tl.float32)
    for segment in tl.static_range(NUM_SEGMENTS):
        total += tl.load(partials + (segment * num_rows + row) * M + cols, mask=mask, other=0.0)
    factor = None if scale is None else tl.load(scale + cols, mask=mask, other=0.0)
    addend = None if bias is None else tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + cols, finish(total, factor, addend).to(out.dtype.element_ty), mask=mask)


def _constants(config: LinearConfig, in_features: int) -> dict[str, Any]:
    return tile_constants(config.tile, in_features) | {
        "ONE_SEGMENT": config.num_segments == 1,
        "IS_SPLIT": config.is_split,
    }


def linear_spec(
    num_rows: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    capability: int,
    *,
    is_int8: bool = False,
    out_dtype: torch.dtype | None = None,
) -> KernelSpec:
    """The launch of `linear` or `int8_linear`, without bias, for `x` `[num_rows, K]`; `sizes` is (K, M)."""
    in_features, out_features = sizes
    config = linear_config(num_rows, in_features, out_features, dtype, capability, is_int8=is_int8)
    element = TYPE_NAMES[dtype]
    arguments = {"x": f"*{element}", "weight": "*i8" if is_int8 else f"*{element}"}
    constants: dict[str, Any] = {"bias": None}
    if is_int8 and not config.is_split:
        arguments["scale"] = "*fp32"
    else:
        constants["scale"] = None
    arguments["out"] = "*fp32" if config.is_split else f"*{TYPE_NAMES[out_dtype or dtype]}"
    integers = {"K": in_features, "M": out_features, "x_stride": in_features, "out_stride": out_features}
    return KernelSpec(
        name=f"{'int8 ' if is_int8 else ''}linear {in_features} to {out_features}, {num_rows} rows",
        function=_linear_kernel,
        arguments=arguments | dict.fromkeys(("num_rows", *integers, "segment_steps"), "i32"),
        constants=constants | _constants(config, in_features),
        num_warps=config.tile.num_warps,
        num_stages=config.tile.num_stages,
        aligned=tuple(name for name, value in integers.items() if value % 16 == 0),
        uses_tensor_cores=dtype != torch.float32,
        is_memory_bound=num_rows <= 64,
    )


def sum_spec(num_segments: int, out_features: int, dtype: torch.dtype, *, is_int8: bool = False) -> KernelSpec:
    """The launch that adds the segments of a split product."""
    constants = {"NUM_SEGMENTS": num_segments, "BLOCK": _SUM_BLOCK, "bias": None} | ({} if is_int8 else {"scale": None})
    return KernelSpec(
        name=f"{'int8 ' if is_int8 else ''}sum of {num_segments} segments",
        function=_sum_segments_kernel,
        arguments={"partials": "*fp32", "out": f"*{TYPE_NAMES[dtype]}"}
        | ({"scale": "*fp32"} if is_int8 else {})
        | dict.fromkeys(("num_rows", "M", "out_stride"), "i32"),
        constants=constants,
        num_warps=1,
        num_stages=1,
        aligned=("M", "out_stride") if out_features % 16 == 0 else (),
        is_memory_bound=True,
    )


def dense_specs(names: Iterable[str], shape: ModelShape, capability: int, *, is_int8: bool = False) -> list[KernelSpec]:
    """Every launch of these bfloat16 products: one row, a middling batch, a long prompt; lm_head returns fp32."""
    specs = []
    dtype = torch.bfloat16
    for name in names:
        sizes = linear_shapes(shape)[name]
        out_dtype = torch.float32 if name == "lm_head" else dtype
        for num_rows in (1, 256, 8192):
            config = linear_config(num_rows, *sizes, dtype, capability, is_int8=is_int8)
            specs.append(linear_spec(num_rows, sizes, dtype, capability, is_int8=is_int8, out_dtype=out_dtype))
            if config.is_split:
                specs.append(sum_spec(config.num_segments, sizes[1], out_dtype, is_int8=is_int8))
    return specs


def kernel_specs(shape: ModelShape, capability: int = 90) -> list[KernelSpec]:
    """Every launch of a model's dense products in bfloat16."""
    return dense_specs(linear_shapes(shape), shape, capability)


def linear_cost(num_rows: int, in_features: int, out_features: int, item_size: int = 2) -> OpCost:
    """Weight, input and output each once."""
    items = in_features * out_features + num_rows * (in_features + out_features)
    return OpCost(items * item_size, 2 * num_rows * in_features * out_features)


def linear_shapes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """name |-> (K, M) of a model's dense products."""
    heads = shape.num_heads * shape.head_dim
    shapes = {
        "qkv": (shape.hidden_size, heads + 2 * shape.num_kv_heads * shape.head_dim),
        "o": (heads, shape.hidden_size),
        "lm_head": (shape.hidden_size, shape.vocab_size),
    }
    if shape.num_experts:
        return shapes | {"router": (shape.hidden_size, shape.num_experts)}
    gate_up, down = (shape.hidden_size, 2 * shape.intermediate_size), (shape.intermediate_size, shape.hidden_size)
    return shapes | {"gate_up": gate_up, "down": down}
