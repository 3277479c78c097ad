"""Mixtures of experts, the choice: which experts a token has, and where its rows lie once sorted by expert.

A (token, choice) pair is numbered `token * top_k + choice`. The plan sorts the pairs by expert and, within one, by
their number, and cuts each expert's rows into tiles. It is made on the device by counting integers: nothing is
copied to the host, and the grid depends on the number of pairs only, so it can be captured in a graph.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .launching import capability_of, compile_options, require, require_tensor
from .model_shapes import ModelShape
from .tile_product import FLOAT_DTYPES, TileConfig, cdiv, tiles_for

_CHUNK = 128  # pairs, and tiles, that one program of the plan places
_HISTOGRAM = 1024  # pairs counted at once
_ROWS_FOR_WIDE_TILES = 96  # mean rows of an expert from which the tile of 128 rows is worth its padding


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Where the pairs of a batch lie, sorted by expert. All tensors are int32 on the batch's device."""

    num_experts: int
    top_k: int
    tile: TileConfig
    sorted_pairs: Tensor  # [pairs]: sorted row |-> pair
    positions: Tensor  # [pairs]: pair |-> sorted row
    tile_experts: Tensor  # [max tiles]: tile |-> expert, -1 past the last tile
    tile_starts: Tensor  # [max tiles]: tile |-> its first sorted row
    tile_stops: Tensor  # [max tiles]: tile |-> the sorted row after its last


def route_experts(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights (fp32) and ids (int32), each `[N, top_k]`, of the experts with the highest softmax probability.

    Best first, ties to the lower id; `renormalize` divides a token's weights by their sum. A row that is not finite
    gets NaN weights and still ids below `num_experts`. `router_logits` is `[N, num_experts]`, any float dtype.
    """
    require_tensor("router_logits", router_logits, (None, None), *FLOAT_DTYPES)
    num_rows, num_experts = router_logits.shape
    require(0 < top_k <= num_experts, f"top_k is {top_k}, it must be 1 to the number of experts, {num_experts}")
    require(router_logits.stride(1) == 1 or num_experts == 1, "router_logits' rows must be contiguous")
    weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=router_logits.device)
    ids = torch.empty((num_rows, top_k), dtype=torch.int32, device=router_logits.device)
    if num_rows:
        _route_kernel[(num_rows,)](
            router_logits, weights, ids, router_logits.stride(0), num_experts, TOP_K=top_k, RENORMALIZE=renormalize,
            BLOCK_K=triton.next_power_of_2(top_k), BLOCK=_expert_block(num_experts), **compile_options(1, 1),
        )  # fmt: skip
    return weights, ids


def plan_experts(expert_ids: Tensor, num_experts: int, dtype: torch.dtype) -> ExpertPlan:
    """Sort the pairs of `expert_ids` `[N, top_k]` (int32 or int64, contiguous) for experts with `dtype` weights.

    An id outside 0 to `num_experts` - 1 belongs to no expert: its pair has position -1 and contributes nothing.
    """
    require_tensor("expert_ids", expert_ids, (None, None), torch.int32, torch.int64)
    require(expert_ids.is_contiguous() and expert_ids.shape[1] > 0, "expert_ids must be contiguous, a choice per token")
    num_pairs, device = expert_ids.numel(), expert_ids.device
    tile = expert_tile(num_pairs, num_experts, dtype, capability_of(device))
    max_tiles = num_pairs // tile.block_rows + min(num_experts, num_pairs)
    sizes = (num_pairs, num_pairs, max_tiles, max_tiles, max_tiles)
    sorted_pairs, positions, experts, starts, stops = (torch.empty(n, dtype=torch.int32, device=device) for n in sizes)
    plan = ExpertPlan(num_experts, expert_ids.shape[1], tile, sorted_pairs, positions, experts, starts, stops)
    if num_pairs:
        _plan_kernel[(cdiv(max(num_pairs, max_tiles), _CHUNK),)](
            expert_ids, sorted_pairs, positions, experts, starts, stops, num_pairs, num_experts, max_tiles,
            BLOCK_ROWS=tile.block_rows, BLOCK=_expert_block(num_experts), CHUNK=_CHUNK, HISTOGRAM=_HISTOGRAM,
            **compile_options(4, 1),
        )  # fmt: skip
    return plan


def expert_tile(num_pairs: int, num_experts: int, dtype: torch.dtype, capability: int) -> TileConfig:
    """Few rows an expert: the smallest tile. The bits do not depend on the choice (tile_product.py)."""
    tiles = tiles_for(dtype, capability, one_segment=True)
    return tiles[min(1, len(tiles) - 1)] if num_pairs >= _ROWS_FOR_WIDE_TILES * num_experts else tiles[0]


def _expert_block(num_experts: int) -> int:
    return max(32, int(triton.next_power_of_2(num_experts)))


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits, weights, ids, logits_stride, num_experts,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    valid = experts < num_experts
    logit = tl.load(logits + row * logits_stride + experts, mask=valid, other=-float("inf")).to(tl.float32)
    exponential = tl.exp(logit - tl.max(logit, 0))
    probability = exponential / tl.sum(exponential, 0)
    # What is not a number counts as 0 when choosing, so that each choice is an expert that exists.
    score = tl.where(valid, tl.where(probability == probability, probability, 0.0), -1.0)
    choices = tl.arange(0, BLOCK_K)
    chosen_weights = tl.zeros((BLOCK_K,), tl.float32)
    chosen_ids = tl.zeros((BLOCK_K,), tl.int32)
    for choice in tl.static_range(TOP_K):
        best = tl.argmax(score, 0, tie_break_left=True)
        weight = tl.sum(tl.where(experts == best, probability, 0.0), 0)
        chosen_weights = tl.where(choices == choice, weight, chosen_weights)
        chosen_ids = tl.where(choices == choice, best, chosen_ids)
        score = tl.where(experts == best, -1.0, score)
    if RENORMALIZE:
        chosen_weights /= tl.sum(chosen_weights, 0)
    tl.store(weights + row * TOP_K + choices, chosen_weights, mask=choices < TOP_K)
    tl.store(ids + row * TOP_K + choices, chosen_ids, mask=choices < TOP_K)


@triton.jit
def _count(expert_ids, first, stop, num_experts, BLOCK: tl.constexpr, HISTOGRAM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs of each expert among those numbered first to stop."""
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, stop, HISTOGRAM):
        pairs = start + tl.arange(0, HISTOGRAM)
        expert = tl.load(expert_ids + pairs, mask=pairs < stop, other=-1).to(tl.int32)
        counts += tl.histogram(expert, BLOCK, mask=(expert >= 0) & (expert < num_experts))
    return counts


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _plan_kernel(  # type: ignore[no-untyped-def]
    expert_ids, sorted_pairs, positions, tile_experts, tile_starts, tile_stops, num_pairs, num_experts, max_tiles,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, HISTOGRAM: tl.constexpr,
):  # fmt: skip
    # grid: [chunks of pairs, or of tiles where these are more]; each program counts all pairs itself, which costs less
    # than a second launch.
    first = tl.program_id(0) * CHUNK
    before = _count(expert_ids, 0, tl.minimum(first, num_pairs), num_experts, BLOCK, HISTOGRAM)
    counts = before + _count(expert_ids, first, num_pairs, num_experts, BLOCK, HISTOGRAM)
    ends = tl.cumsum(counts, 0)
    offsets = ends - counts

    pairs = first + tl.arange(0, CHUNK)
    expert = tl.load(expert_ids + pairs, mask=pairs < num_pairs, other=-1).to(tl.int32)
    valid = (expert >= 0) & (expert < num_experts)
    same = expert[:, None] == expert[None, :]
    earlier = tl.arange(0, CHUNK)[None, :] < tl.arange(0, CHUNK)[:, None]
    rank = tl.sum((same & earlier).to(tl.int32), 1)
    position = tl.gather(offsets + before, tl.where(valid, expert, 0), 0) + rank
    tl.store(positions + pairs, tl.where(valid, position, -1), mask=pairs < num_pairs)
    tl.store(sorted_pairs + position, pairs, mask=valid)

    expert_tiles = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    tile_ends = tl.cumsum(expert_tiles, 0)
    tiles = pairs
    owner = tl.sum((tile_ends[None, :] <= tiles[:, None]).to(tl.int32), 1)
    exists = owner < num_experts
    owner = tl.minimum(owner, BLOCK - 1)
    start = tl.gather(offsets, owner, 0) + (tiles - tl.gather(tile_ends - expert_tiles, owner, 0)) * BLOCK_ROWS
    tl.store(tile_experts + tiles, tl.where(exists, owner, -1), mask=tiles < max_tiles)
    tl.store(tile_starts + tiles, start, mask=tiles < max_tiles)
    tl.store(tile_stops + tiles, tl.minimum(start + BLOCK_ROWS, tl.gather(ends, owner, 0)), mask=tiles < max_tiles)


def plan_specs(shape: ModelShape, capability: int) -> list[KernelSpec]:
    """The launches of `route_experts` (bfloat16 logits) and `plan_experts`, for one token and for a long prompt."""
    top_k, block = shape.experts_per_token, _expert_block(shape.num_experts)
    logits = {"logits": "*bf16", "weights": "*fp32", "ids": "*i32", "logits_stride": "i32", "num_experts": "i32"}
    constants = {"TOP_K": top_k, "RENORMALIZE": True, "BLOCK_K": triton.next_power_of_2(top_k), "BLOCK": block}
    aligned = ("logits_stride", "num_experts") if shape.num_experts % 16 == 0 else ()
    specs = [KernelSpec("route experts", _route_kernel, logits, constants, 1, 1, aligned)]
    pointers = ("expert_ids", "sorted_pairs", "positions", "tile_experts", "tile_starts", "tile_stops")
    arguments = dict.fromkeys(pointers, "*i32") | dict.fromkeys(("num_pairs", "num_experts", "max_tiles"), "i32")
    for num_rows in (1, 8192):
        tile = expert_tile(num_rows * top_k, shape.num_experts, torch.bfloat16, capability)
        constants = {"BLOCK_ROWS": tile.block_rows, "BLOCK": block, "CHUNK": _CHUNK, "HISTOGRAM": _HISTOGRAM}
        specs.append(
            KernelSpec(f"plan experts, {num_rows} rows", _plan_kernel, arguments, constants, 4, 1, aligned[1:])
        )
    return specs
