"""Causal attention of prompt chunks over the paged cache, which holds the cached prefix and the chunk already.

A program takes ROW_TILE rows of one sequence and one KV head. Its rows are the query heads of the group side by side,
token by token, so a tile of 128 rows is 32 tokens of a model with 4 query heads a KV head: few keys are loaded in vain
at the diagonal, and a short chunk fills a tile.

    row r of a tile  |->  token r // GROUP of the chunk, query head kv_head * GROUP + r % GROUP

Keys are taken in tiles that start at multiples of KEY_TILE from token 0, always by the same machine code. So the bits
of a row depend on its sequence alone: not on how the prompt was cut into chunks, nor on what shares the batch.
The loop is FlashAttention-2's (Dao, 2023); tiles above the diagonal are not visited, those below it are not masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_common import (
    LOG2_E,
    MAX_SEQUENCES,
    TRITON_TYPES,
    attention_output,
    cap_scores,
    check_attention,
    find_owner,
    padded_head_dim,
    softmax_step,
)
from .compiling import KernelSpec
from .cost import OpCost
from .launching import capability_of, compile_options, require, require_tensor
from .model_shapes import ModelShape


@triton.jit
def _attend_tiles(  # type: ignore[no-untyped-def]
    acc, peak, total, scores, q, positions, head_kv, table, begin, end, oldest, stop, block_stride, window,
    log2_scale, soft_cap,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the tiles of keys from `begin` to `end`; keys outside of oldest..stop are not read.

    `scores` come in as those of the tile at `begin` and go out as those of the tile after the last: a tile's scores
    are multiplied one turn ahead, so the tensor cores are busy while the exponentials of the tile before are taken
    (FlashAttention-3's overlap within a warp group). IS_MASKED: some rows do not see some of the keys.
    """
    keys = tl.arange(0, KEY_TILE)
    is_dim = (tl.arange(0, q.shape[1]) < HEAD_DIM)[None, :]
    # A tile starts at a multiple of KEY_TILE, so this is the same for every tile.
    ids = table + keys // BLOCK_SIZE
    in_block = head_kv + (keys % BLOCK_SIZE * HEAD_DIM)[:, None]
    # Block ids are loaded a turn before they are needed. Keys and values are a tile apart and load theirs separately:
    # a value handed on over two turns would keep the compiler from pipelining the loop.
    value_blocks = tl.load(ids + begin // BLOCK_SIZE, mask=begin + keys < stop, other=0)
    key_blocks = tl.load(ids + (begin + KEY_TILE) // BLOCK_SIZE, mask=begin + KEY_TILE + keys < stop, other=0)
    for start in range(begin, end, KEY_TILE):
        tokens = start + keys
        following = start + KEY_TILE
        at = in_block + following % BLOCK_SIZE * HEAD_DIM + (key_blocks.to(tl.int64) * block_stride)[:, None]
        key = tl.load(at, mask=(following + keys < stop)[:, None] & is_dim, other=0.0)
        next_scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        if HAS_SOFT_CAP:
            scores = cap_scores(scores, log2_scale, soft_cap)
        if IS_MASKED:
            visible = tokens[None, :] <= positions[:, None]
            if HAS_WINDOW:
                visible = visible & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        weights, shrink, peak, total = softmax_step(
            scores, peak, total, 1.0 if HAS_SOFT_CAP else log2_scale, IS_MASKED and HAS_WINDOW
        )
        at = in_block + start % BLOCK_SIZE * HEAD_DIM + (value_blocks.to(tl.int64) * block_stride)[:, None]
        is_value = ((tokens < stop) & (tokens >= oldest))[:, None] & is_dim if IS_MASKED else is_dim
        value = tl.load(at + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=is_value, other=0.0)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        value_blocks = tl.load(ids + following // BLOCK_SIZE, mask=following + keys < stop, other=0)
        key_blocks = tl.load(
            ids + (following + KEY_TILE) // BLOCK_SIZE, mask=following + KEY_TILE + keys < stop, other=0
        )
        scores = next_scores
    return acc, peak, total, scores


@triton.jit
def _attend_rows(  # type: ignore[no-untyped-def]
    q, positions, head_kv, table, first, last, block_stride, window, log2_scale, soft_cap,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of rows at `positions`, the lowest of which is `first`, the highest `last`.

    keys |  begin .. masked: where windows start | clear .. not masked | diagonal .. masked | last
    """
    stop = last + 1
    diagonal = (first + 1) // KEY_TILE * KEY_TILE
    oldest = tl.maximum(first - window + 1, 0) if HAS_WINDOW else 0
    begin = oldest // KEY_TILE * KEY_TILE
    keys = begin + tl.arange(0, KEY_TILE)
    blocks = tl.load(table + keys // BLOCK_SIZE, mask=(keys < stop) & (keys >= oldest), other=0).to(tl.int64)
    key = tl.load(
        head_kv + (blocks * block_stride + keys % BLOCK_SIZE * HEAD_DIM)[:, None],
        mask=((keys < stop) & (keys >= oldest))[:, None] & (tl.arange(0, q.shape[1]) < HEAD_DIM)[None, :],
        other=0.0,
    )
    scores = tl.dot(q, tl.trans(key), input_precision="ieee")
    peak = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    clear = begin
    if HAS_WINDOW:
        clear = tl.minimum(tl.cdiv(tl.maximum(stop - window, 0), KEY_TILE) * KEY_TILE, diagonal)
        acc, peak, total, scores = _attend_tiles(
            acc, peak, total, scores, q, positions, head_kv, table, begin, clear, oldest, stop, block_stride, window,
            log2_scale, soft_cap, True, HAS_WINDOW, HAS_SOFT_CAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEY_TILE,
        )  # fmt: skip
    acc, peak, total, scores = _attend_tiles(
        acc, peak, total, scores, q, positions, head_kv, table, clear, diagonal, oldest, stop, block_stride, window,
        log2_scale, soft_cap, False, HAS_WINDOW, HAS_SOFT_CAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEY_TILE,
    )  # fmt: skip
    acc, peak, total, scores = _attend_tiles(
        acc, peak, total, scores, q, positions, head_kv, table, diagonal, stop, oldest, stop, block_stride, window,
        log2_scale, soft_cap, True, HAS_WINDOW, HAS_SOFT_CAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEY_TILE,
    )  # fmt: skip
    return acc / total[:, None]


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "window"])
def _attend_chunks(  # type: ignore[no-untyped-def]
    query, kv, tables, cu_seqlens, context_lens, out, query_stride, block_stride, table_stride, num_sequences, window,
    log2_scale, soft_cap,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr, MAX_SEQUENCES: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    sequences = tl.arange(0, MAX_SEQUENCES)
    lengths = tl.load(cu_seqlens + sequences + 1, mask=sequences < num_sequences, other=0)
    lengths -= tl.load(cu_seqlens + sequences, mask=sequences < num_sequences, other=0)
    counts = tl.cdiv(lengths * GROUP, ROW_TILE)
    if tile >= tl.sum(counts, 0):
        return
    sequence, first_tile = find_owner(tl.cumsum(counts, 0), tile, MAX_SEQUENCES)
    first_row = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - first_row
    context = tl.load(context_lens + sequence)
    # The last tiles of a sequence see the most keys and start first.
    begin_row = (tl.cdiv(length * GROUP, ROW_TILE) - 1 - (tile - first_tile)) * ROW_TILE
    rows = begin_row + tl.arange(0, ROW_TILE)
    dims = tl.arange(0, DIM_TILE)
    tokens = rows // GROUP
    is_row = (tokens < length)[:, None] & (dims < HEAD_DIM)[None, :]
    at = ((kv_head * GROUP + rows % GROUP) * HEAD_DIM)[:, None] + dims[None, :]
    token_rows = (first_row + tokens).to(tl.int64)[:, None]
    q = tl.load(query + token_rows * query_stride + at, mask=is_row, other=0.0)

    head_kv = kv + kv_head * (BLOCK_SIZE * HEAD_DIM) + dims[None, :]
    table = tables + sequence.to(tl.int64) * table_stride
    result = _attend_rows(
        q, tl.minimum(context - length + tokens, context - 1), head_kv, table, context - length + begin_row // GROUP,
        tl.minimum(context - length + (begin_row + ROW_TILE - 1) // GROUP, context - 1),
        block_stride, window, log2_scale, soft_cap,
        HAS_WINDOW, HAS_SOFT_CAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEY_TILE,
    )  # fmt: skip
    tl.store(out + token_rows * (NUM_HEADS * HEAD_DIM) + at, result.to(out.dtype.element_ty), mask=is_row)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tiles and launch parameters; they depend on the model and the device, never on the batch."""

    constants: dict[str, Any]
    num_warps: int
    num_stages: int


def prefill_config(
    heads: tuple[int, int, int], block_size: int, window: int, soft_cap: float, dtype: torch.dtype, capability: int
) -> PrefillConfig:
    """For `heads` = (H, KVH, D)."""
    num_heads, num_kv_heads, head_dim = heads
    dim_tile = padded_head_dim(head_dim)
    if dtype == torch.float32:  # no tensor cores: the operands of a product lie in registers
        row_tile, key_tile, num_stages = 16, 16, 1
    elif capability < 90:
        row_tile, key_tile, num_stages = (128, 32, 3) if dim_tile <= 128 else (64, 32, 2)
    else:
        row_tile, key_tile, num_stages = (128, 64, 3) if dim_tile <= 128 else (64, 32, 3)
    constants = {
        "HAS_WINDOW": window > 0,
        "HAS_SOFT_CAP": soft_cap > 0,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "ROW_TILE": row_tile,
        "DIM_TILE": dim_tile,
        "KEY_TILE": key_tile,
        "MAX_SEQUENCES": MAX_SEQUENCES,
    }
    return PrefillConfig(constants, 8, num_stages)


def prefill_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of chunks over everything before them; returns `[N, H, D]`.

    `query` is `[N, H, D]` (rows may be views into wider ones); sequence s owns the rows `cu_seqlens[s]` to
    `cu_seqlens[s + 1]` (`[S + 1]` int32), at most `max_query_len`, which are the last of its `context_lens[s]` tokens
    (`[S]` int32). `kv_layer` is one layer's view `[num_blocks, 2, KVH, block_size, D]` that holds all these tokens'
    keys and values, `block_tables` `[S, max_blocks]` int32. `window` and `soft_cap` as in reference.paged_attention.
    Rows from `cu_seqlens[S]` on are not written. Raises ValueError for arguments that do not fit each other.
    """
    check_attention(query, kv_layer, block_tables, context_lens, scale)
    num_sequences = context_lens.shape[0]
    require_tensor("cu_seqlens", cu_seqlens, (num_sequences + 1,), torch.int32)
    require(cu_seqlens.is_contiguous(), "cu_seqlens is not contiguous")
    require(window >= 0 and soft_cap >= 0, f"window {window} and soft_cap {soft_cap} must not be negative")
    out = attention_output(query, out)
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    heads = (num_heads, num_kv_heads, head_dim)
    config = prefill_config(heads, block_size, window, soft_cap, query.dtype, capability_of(query.device))
    row_tile, group = config.constants["ROW_TILE"], num_heads // num_kv_heads
    # Every sequence may end in a tile of its own that is not full.
    tiles = min(
        num_rows * group // row_tile + num_sequences, num_sequences * triton.cdiv(max_query_len * group, row_tile)
    )
    if tiles == 0:
        return out
    _attend_chunks[(tiles * num_kv_heads,)](
        query, kv_layer, block_tables, cu_seqlens, context_lens, out,
        query.stride(0), kv_layer.stride(0), block_tables.stride(0), num_sequences, window, scale * LOG2_E, soft_cap,
        **config.constants, **compile_options(config.num_warps, config.num_stages),
    )  # fmt: skip
    return out


def prefill_attention_cost(chunks: Sequence[tuple[int, int]], heads: tuple[int, int, int], itemsize: int) -> OpCost:
    """One layer, chunks given as (tokens before, tokens now): keys and values once, queries in, outputs out; `heads`
    is (H, KVH, D). Only visible scores are counted, as in FlashAttention's published rates."""
    num_heads, num_kv_heads, head_dim = heads
    moved = sum(2 * (before + now) * num_kv_heads + 2 * now * num_heads for before, now in chunks)
    scores = sum(now * before + now * (now + 1) // 2 for before, now in chunks)
    return OpCost(bytes=moved * head_dim * itemsize, flops=4 * scores * num_heads * head_dim)


def kernel_specs(
    shape: ModelShape,
    capability: int,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    soft_cap: float = 0.0,
) -> list[KernelSpec]:
    """The launch of one layer of this model."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    config = prefill_config(heads, block_size, window, soft_cap, dtype, capability)
    element = "*" + TRITON_TYPES[dtype]
    ints = dict.fromkeys(("query_stride", "block_stride", "table_stride", "num_sequences", "window"), "i32")
    arguments = {"query": element, "kv": element, "out": element}
    arguments |= dict.fromkeys(("tables", "cu_seqlens", "context_lens"), "*i32")
    arguments |= ints | {"log2_scale": "fp32", "soft_cap": "fp32"}
    return [
        KernelSpec(
            "prefill attention",
            _attend_chunks,
            arguments,
            config.constants,
            config.num_warps,
            config.num_stages,
            aligned=("query_stride", "block_stride"),
            uses_tensor_cores=dtype != torch.float32,
        )
    ]
