"""Mixtures of experts, the products: each expert's weight times the rows of the tokens that chose it.

Rows are gathered through an ExpertPlan while a tile is loaded and results stay sorted by expert until
`combine_experts` adds a token's choices in their order. Nothing is padded, copied or read by the host. A token's
result has the same bits whichever tokens share its experts' tiles (see tile_product.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import silu_and_mul
from .compiling import KernelSpec
from .cost import OpCost
from .expert_plan import ExpertPlan, expert_tile, plan_experts, plan_specs, route_experts
from .launching import compile_options, require, require_tensor
from .model_shapes import ModelShape
from .tile_product import FLOAT_DTYPES, cdiv, check_out, dot_range, tile_constants, tile_of

_COMBINE_BLOCK = 512


def grouped_linear(
    x: Tensor, weights: Tensor, plan: ExpertPlan, *, is_sorted: bool, out: Tensor | None = None
) -> Tensor:
    """Each pair's row times its expert's weight, `[pairs, M]`, rows sorted by expert as the plan says.

    `x` is `[N, K]`, a row per token, which is gathered, or with `is_sorted` `[pairs, K]`, already in the plan's order;
    `weights` is `[E, M, K]`, contiguous, of x's dtype. Sums in fp32, rounded once. Raises ValueError.
    """
    num_pairs = plan.sorted_pairs.shape[0]
    require_tensor("x", x, (num_pairs if is_sorted else num_pairs // plan.top_k, None), *FLOAT_DTYPES)
    require_tensor("weights", weights, (plan.num_experts, None, x.shape[1]), x.dtype)
    require(weights.is_contiguous() and weights.numel() > 0, "weights must be contiguous and not empty")
    require(x.stride(1) == 1 or x.shape[1] == 1, "x's rows must be contiguous")
    require(weights.device == x.device == plan.positions.device, "x, weights and plan must be on one device")
    out_features, in_features = weights.shape[1:]
    out = check_out(out, (num_pairs, out_features), x.dtype, x.device)
    if num_pairs == 0:
        return out
    tile, num_tiles = plan.tile, plan.tile_experts.shape[0]
    _grouped_kernel[(num_tiles * cdiv(out_features, tile.block_cols),)](
        x, weights, out, plan.sorted_pairs, plan.tile_experts, plan.tile_starts, plan.tile_stops,
        num_tiles, in_features, out_features, x.stride(0), out.stride(0),
        TOP_K=0 if is_sorted else plan.top_k, **tile_constants(tile, in_features),
        **compile_options(tile.num_warps, tile.num_stages),
    )  # fmt: skip
    return out


def combine_experts(expert_out: Tensor, expert_weights: Tensor, plan: ExpertPlan, out: Tensor | None = None) -> Tensor:
    """The weighted sum of a token's choices, 0 to top_k - 1 in this order, in fp32; `[N, M]` in expert_out's dtype.

    `expert_out` is `[pairs, M]` in the plan's order, `expert_weights` `[N, top_k]` fp32.
    """
    num_pairs = plan.sorted_pairs.shape[0]
    num_rows = num_pairs // plan.top_k
    require_tensor("expert_out", expert_out, (num_pairs, None), *FLOAT_DTYPES)
    require_tensor("expert_weights", expert_weights, (num_rows, plan.top_k), torch.float32)
    require(expert_out.is_contiguous() and expert_weights.is_contiguous(), "expert_out, expert_weights: not contiguous")
    size = expert_out.shape[1]
    out = check_out(out, (num_rows, size), expert_out.dtype, expert_out.device)
    if num_rows:
        _combine_kernel[(num_rows, cdiv(size, _COMBINE_BLOCK))](
            expert_out, expert_weights, plan.positions, out, size, out.stride(0),
            TOP_K=plan.top_k, BLOCK=_COMBINE_BLOCK, **compile_options(2, 1),
        )  # fmt: skip
    return out


def moe_forward(
    x: Tensor,
    router_logits: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    top_k: int,
    renormalize: bool,
) -> Tensor:
    """A mixture-of-experts layer after its router; `[N, hidden]`. The definition is `reference.moe_forward`.

    `x` is `[N, hidden]`, `router_logits` `[N, E]`, `gate_up_weights` `[E, 2 * I, hidden]` with the gate's rows first,
    `down_weights` `[E, hidden, I]`. What passes between the products is rounded to x's dtype.
    """
    require_tensor("router_logits", router_logits, (x.shape[0], gate_up_weights.shape[0]))
    expert_weights, expert_ids = route_experts(router_logits, top_k, renormalize)
    plan = plan_experts(expert_ids, gate_up_weights.shape[0], x.dtype)
    gate_up = grouped_linear(x, gate_up_weights, plan, is_sorted=False)
    expert_out = grouped_linear(silu_and_mul(gate_up), down_weights, plan, is_sorted=True)
    return combine_experts(expert_out, expert_weights, plan)


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_kernel(  # type: ignore[no-untyped-def]
    x, weights, out, sorted_pairs, tile_experts, tile_starts, tile_stops, num_tiles, K, M, x_stride, out_stride,
    TOP_K: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # grid: [most tiles there can be * column tiles]. TOP_K 0: x's rows are sorted already.
    row_tile, col_tile = tile_of(tl.program_id(0), num_tiles * BLOCK_ROWS, M, BLOCK_ROWS, BLOCK_COLS)
    expert = tl.load(tile_experts + row_tile)
    if expert < 0:
        return
    rows = tl.load(tile_starts + row_tile) + tl.arange(0, BLOCK_ROWS)
    row_mask = rows < tl.load(tile_stops + row_tile)
    x_rows = rows if TOP_K == 0 else tl.load(sorted_pairs + rows, mask=row_mask, other=0) // TOP_K
    cols = col_tile * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    ks = tl.arange(0, BLOCK_K)
    x_tile = x + x_rows.to(tl.int64)[:, None] * x_stride + ks[None, :]
    # Columns past the end read the last row of the weight again: their sums are not stored.
    weight_rows = expert.to(tl.int64) * M + tl.minimum(cols, M - 1)
    weight_tile = weights + weight_rows[None, :] * K + ks[:, None]
    total = dot_range(
        x_tile, weight_tile, row_mask, ks, 0, tl.cdiv(K, BLOCK_K), K, BLOCK_ROWS, BLOCK_COLS, BLOCK_K, EVEN_K
    )
    out_tile = out + rows.to(tl.int64)[:, None] * out_stride + cols[None, :]
    tl.store(out_tile, total.to(out.dtype.element_ty), mask=row_mask[:, None] & (cols < M)[None, :])


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    expert_out, expert_weights, positions, out, M, out_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    # grid: [tokens, blocks of columns]
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < M
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        position = tl.load(positions + token * TOP_K + choice).to(tl.int64)
        present = cols < tl.where(position >= 0, M, 0)
        row = tl.load(expert_out + position * M + cols, mask=present, other=0.0).to(tl.float32)
        weight = tl.load(expert_weights + token * TOP_K + choice)
        total = tl.fma(row, tl.broadcast_to(weight, row.shape), total)
    tl.store(out + token * out_stride + cols, total.to(out.dtype.element_ty), mask=mask)


def moe_cost(num_rows: int, shape: ModelShape, item_size: int = 2) -> OpCost:
    """Products of one layer's experts: the weights of as many experts as uniform choices would wake, once each."""
    hidden, size, top_k = shape.hidden_size, shape.expert_intermediate_size, shape.experts_per_token
    expert_items = 3 * hidden * size
    awake = shape.num_experts * (1 - (1 - top_k / shape.num_experts) ** num_rows)
    rows = num_rows * top_k
    # x gathered, gate and up written and read, the activation written and read, down written and read, out written.
    items = round(awake * expert_items) + rows * (hidden + 4 * size + 2 * size + 2 * hidden) + num_rows * hidden
    return OpCost(items * item_size, 2 * rows * expert_items)


def kernel_specs(shape: ModelShape, capability: int = 90) -> list[KernelSpec]:
    """Every launch of a mixture of experts in bfloat16: one token, and a long prompt. A dense model has none."""
    if not shape.num_experts:
        return []
    size, hidden = shape.expert_intermediate_size, shape.hidden_size
    specs = plan_specs(shape, capability)
    for name, in_features, out_features in (("gate_up", hidden, 2 * size), ("down", size, hidden)):
        for num_rows in (1, 8192):
            tile = expert_tile(num_rows * shape.experts_per_token, shape.num_experts, torch.bfloat16, capability)
            sizes = {"K": in_features, "M": out_features, "x_stride": in_features, "out_stride": out_features}
            pointers = dict.fromkeys(("sorted_pairs", "tile_experts", "tile_starts", "tile_stops"), "*i32")
            arguments = dict.fromkeys(("x", "weights", "out"), "*bf16") | pointers
            top_k = shape.experts_per_token if name == "gate_up" else 0
            specs.append(
                KernelSpec(
                    name=f"experts' {name}, {num_rows} rows",
                    function=_grouped_kernel,
                    arguments=arguments | dict.fromkeys(("num_tiles", *sizes), "i32"),
                    constants=tile_constants(tile, in_features) | {"TOP_K": top_k},
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                    aligned=tuple(name for name, value in sizes.items() if value % 16 == 0),
                    uses_tensor_cores=True,
                    is_memory_bound=num_rows == 1,
                )
            )
    return [*specs, _combine_spec(shape)]


def _combine_spec(shape: ModelShape) -> KernelSpec:
    pointers = {"expert_out": "*bf16", "expert_weights": "*fp32", "positions": "*i32", "out": "*bf16"}
    return KernelSpec(
        name="combine experts",
        function=_combine_kernel,
        arguments=pointers | {"M": "i32", "out_stride": "i32"},
        constants={"TOP_K": shape.experts_per_token, "BLOCK": _COMBINE_BLOCK},
        num_warps=2,
        num_stages=1,
        aligned=("M", "out_stride"),
        is_memory_bound=True,
    )
