"""Attention of one query token per sequence over the paged cache: pieces of fixed length, combined in fixed order.

    sequence 0 (700 tokens)   | piece 0 | piece 1 | piece 2 |        items = (piece, head tile), numbered over the
    sequence 1 (0, padding)                                          whole batch; program p takes the items p, p + grid,
    sequence 2 (90 tokens)    | piece 3 |                            p + 2 grid, ...

A piece is PIECE_TOKENS tokens from a multiple of it, whatever the batch, so a sequence gets the same bits in any
company (flash-decoding, Dao et al. 2023, splits by the grid instead). A sequence of one piece is written at once; the
others leave normalised partial outputs and log-sum-exps, which a second kernel combines in the order of the pieces.
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
from .compiling import SHARED_MEMORY_LIMIT, KernelSpec
from .cost import OpCost
from .launching import capability_of, compile_options, num_multiprocessors, require, require_tensor
from .model_shapes import ModelShape

PIECE_TOKENS = 256
PIECE_TILE = 16  # pieces that the second kernel takes at a time
COMBINE_WARPS, COMBINE_STAGES = 4, 4


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Partial results of the pieces of one step, in float32; made once, used by every layer of every step."""

    partial_out: Tensor  # [max_pieces, H, D]
    partial_lse: Tensor  # [max_pieces, H], log2

    @staticmethod
    def max_pieces(max_sequences: int, max_total_tokens: int) -> int:
        """Pieces that `max_sequences` contexts of together `max_total_tokens` can have: each may end in a short one."""
        return max_total_tokens // PIECE_TOKENS + max_sequences

    @staticmethod
    def num_bytes(max_sequences: int, max_total_tokens: int, num_heads: int, head_dim: int) -> int:
        """What `allocate` takes."""
        return DecodeWorkspace.max_pieces(max_sequences, max_total_tokens) * num_heads * (head_dim + 1) * 4

    @classmethod
    def allocate(
        cls, max_sequences: int, max_total_tokens: int, num_heads: int, head_dim: int, device: torch.device | str
    ) -> "DecodeWorkspace":
        """Room for every batch of at most these sizes (contexts that share blocks count each for itself)."""
        pieces = cls.max_pieces(max_sequences, max_total_tokens)
        return cls(
            torch.empty((pieces, num_heads, head_dim), dtype=torch.float32, device=device),
            torch.empty((pieces, num_heads), dtype=torch.float32, device=device),
        )

    def fits(self, context_lens: Sequence[int]) -> bool:
        """Whether the pieces of these contexts have room. The launcher cannot ask: it never reads device values."""
        return sum(-(-length // PIECE_TOKENS) for length in context_lens) <= self.partial_out.shape[0]


@triton.jit
def _count_pieces(  # type: ignore[no-untyped-def]
    context, window,
    HAS_WINDOW: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The first piece with a visible token, and the number of pieces from there on."""
    first = tl.maximum(context - window, 0) // PIECE if HAS_WINDOW else context * 0
    return first, tl.cdiv(context, PIECE) - first


@triton.jit
def _item_heads(  # type: ignore[no-untyped-def]
    index,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_TILE: tl.constexpr,
):  # fmt: skip
    """The KV head of a piece's item, and the places in its group of the query heads of the tile."""
    TILES: tl.constexpr = (NUM_HEADS // NUM_KV_HEADS + HEAD_TILE - 1) // HEAD_TILE
    return index // TILES, index % TILES * HEAD_TILE + tl.arange(0, HEAD_TILE)


@triton.jit
def _attend_tokens(  # type: ignore[no-untyped-def]
    q, head_kv, table, begin, oldest, end, block_stride, log2_scale, soft_cap,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """Online softmax of one tile of query heads over the tokens oldest..end; `begin` is the tile that holds oldest."""
    keys = tl.arange(0, KEY_TILE)
    is_dim = (tl.arange(0, q.shape[1]) < HEAD_DIM)[None, :]
    # A tile starts at a multiple of KEY_TILE, so this is the same for every tile.
    ids = table + keys // BLOCK_SIZE
    in_block = head_kv + (keys % BLOCK_SIZE * HEAD_DIM)[:, None]
    peak = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    # A tile's block ids are loaded one tile ahead: the wait for them hides behind a tile of keys.
    blocks = tl.load(ids + begin // BLOCK_SIZE, mask=begin + keys < end, other=0)
    for start in range(begin, end, KEY_TILE):
        tokens = start + keys
        visible = tokens < end
        if HAS_WINDOW:
            visible = visible & (tokens >= oldest)
        at = in_block + start % BLOCK_SIZE * HEAD_DIM + (blocks.to(tl.int64) * block_stride)[:, None]
        blocks = tl.load(ids + (start + KEY_TILE) // BLOCK_SIZE, mask=tokens + KEY_TILE < end, other=0)
        key = tl.load(at, mask=visible[:, None] & is_dim, other=0.0)
        value = tl.load(at + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=visible[:, None] & is_dim, other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        if HAS_SOFT_CAP:
            scores = cap_scores(scores, log2_scale, soft_cap)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        # Every tile has a visible token, so no peak is minus infinity.
        weights, shrink, peak, total = softmax_step(scores, peak, total, 1.0 if HAS_SOFT_CAP else log2_scale, False)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return acc / total[:, None], peak + tl.log2(total)


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "max_pieces", "window"])
def _attend_pieces(  # type: ignore[no-untyped-def]
    query, kv, tables, context_lens, out, partial_out, partial_lse, query_stride, block_stride, table_stride,
    num_sequences, max_pieces, window, log2_scale, soft_cap,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr, PIECE: tl.constexpr, MAX_SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Persistent: the grid is the device's size, the items are counted from `context_lens`."""
    ITEMS: tl.constexpr = NUM_KV_HEADS * ((NUM_HEADS // NUM_KV_HEADS + HEAD_TILE - 1) // HEAD_TILE)  # of one piece
    sequences = tl.arange(0, MAX_SEQUENCES)
    contexts = tl.load(context_lens + sequences, mask=sequences < num_sequences, other=0)
    _, counts = _count_pieces(contexts, window, HAS_WINDOW, PIECE)
    ends = tl.cumsum(counts, 0)
    dims = tl.arange(0, DIM_TILE)
    for item in range(tl.program_id(0), tl.sum(counts, 0) * ITEMS, tl.num_programs(0)):
        piece = item // ITEMS
        kv_head, in_group = _item_heads(item % ITEMS, NUM_HEADS, NUM_KV_HEADS, HEAD_TILE)
        sequence, first_of_sequence = find_owner(ends, piece, MAX_SEQUENCES)
        sequence = sequence.to(tl.int64)
        context = tl.load(context_lens + sequence)
        first, count = _count_pieces(context, window, HAS_WINDOW, PIECE)
        begin = (first + piece - first_of_sequence) * PIECE
        end = tl.minimum(begin + PIECE, context)
        oldest = tl.maximum(begin, context - window) if HAS_WINDOW else begin
        heads = kv_head * (NUM_HEADS // NUM_KV_HEADS) + in_group
        is_head = (in_group < NUM_HEADS // NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        at = heads[:, None] * HEAD_DIM + dims[None, :]
        q = tl.load(query + sequence * query_stride + at, mask=is_head, other=0.0)
        result, lse = _attend_tokens(
            q, kv + kv_head * (BLOCK_SIZE * HEAD_DIM) + dims[None, :], tables + sequence * table_stride,
            oldest // KEY_TILE * KEY_TILE, oldest, end, block_stride, log2_scale, soft_cap,
            HAS_WINDOW, HAS_SOFT_CAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEY_TILE,
        )  # fmt: skip
        if count == 1:
            tl.store(out + sequence * (NUM_HEADS * HEAD_DIM) + at, result.to(out.dtype.element_ty), mask=is_head)
        elif piece < max_pieces:
            row = piece.to(tl.int64)
            tl.store(partial_out + row * (NUM_HEADS * HEAD_DIM) + at, result, mask=is_head)
            tl.store(partial_lse + row * NUM_HEADS + heads, lse, mask=in_group < NUM_HEADS // NUM_KV_HEADS)


@triton.jit(do_not_specialize=["max_pieces", "window"])
def _combine_pieces(  # type: ignore[no-untyped-def]
    partial_out, partial_lse, context_lens, out, max_pieces, window,
    HAS_WINDOW: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    PIECE_TILE: tl.constexpr, STAGES: tl.constexpr, PIECE: tl.constexpr, MAX_SEQUENCES: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    sequences = tl.arange(0, MAX_SEQUENCES)
    contexts = tl.load(context_lens + sequences, mask=sequences <= sequence, other=0)
    _, counts = _count_pieces(contexts, window, HAS_WINDOW, PIECE)
    count = tl.sum(tl.where(sequences == sequence, counts, 0), 0)
    if count == 1:
        return
    first = tl.sum(counts, 0) - count
    dims = tl.arange(0, DIM_TILE)
    peak = float("-inf")
    total = tl.zeros([PIECE_TILE], tl.float32)  # summed over the tile's places at the end
    acc = tl.zeros([PIECE_TILE, DIM_TILE], tl.float32)
    for start in tl.range(0, count, PIECE_TILE, num_stages=STAGES):
        index = start + tl.arange(0, PIECE_TILE)
        is_piece = (index < count) & (first + index < max_pieces)
        row = (first + index).to(tl.int64) * NUM_HEADS + head
        lse = tl.load(partial_lse + row, mask=is_piece, other=float("-inf"))
        part = tl.load(
            partial_out + row[:, None] * HEAD_DIM + dims[None, :],
            mask=is_piece[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.exp2(lse - new_peak)
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + weights
        acc = acc * shrink + part * weights[:, None]
        peak = new_peak
    result = tl.sum(acc, 0) / tl.where(count == 0, 1.0, tl.sum(total, 0))
    # Pieces that had no room are lost: not a number is found by the sampler, a wrong number would not be.
    result = tl.where(first + count > max_pieces, float("nan"), result)
    row = sequence.to(tl.int64) * NUM_HEADS + head
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tiles and launch parameters; they depend on the model and the device, never on the batch."""

    constants: dict[str, Any]  # the first kernel's tl.constexpr arguments
    combine_constants: dict[str, Any]  # the second one's
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


def decode_config(
    heads: tuple[int, int, int], block_size: int, window: int, soft_cap: float, dtype: torch.dtype, capability: int
) -> DecodeConfig:
    """For `heads` = (H, KVH, D). As many programs a multiprocessor as its shared memory holds, at most four, each with
    some 48 KB on their way: far more than bandwidth x latency (35 KB), so that one may wait while others load."""
    num_heads, num_kv_heads, head_dim = heads
    key_tile = 16 if dtype == torch.float32 else 32
    shared = {"HAS_WINDOW": window > 0, "NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "PIECE": PIECE_TOKENS}
    shared |= {"DIM_TILE": padded_head_dim(head_dim), "MAX_SEQUENCES": MAX_SEQUENCES}
    constants = {
        "HAS_SOFT_CAP": soft_cap > 0,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD_TILE": min(32, max(16, int(triton.next_power_of_2(num_heads // num_kv_heads)))),
        "KEY_TILE": key_tile,
    }
    tile_bytes = 2 * key_tile * padded_head_dim(head_dim) * dtype.itemsize  # keys and values
    tiles = max(2, min(6, 48 * 1024 // tile_bytes))  # on their way; one more stage works on what has come
    programs = SHARED_MEMORY_LIMIT[capability] // (tiles * tile_bytes + 7 * 1024)
    return DecodeConfig(
        shared | constants,
        shared | {"PIECE_TILE": PIECE_TILE, "STAGES": COMBINE_STAGES},
        4,
        tiles + 1,
        min(4, programs),
    )


def decode_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    workspace: DecodeWorkspace,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's newest token over its whole context; returns `[S, H, D]`.

    `query` is `[S, H, D]` (rows may be views into wider ones), `kv_layer` one layer's view
    `[num_blocks, 2, KVH, block_size, D]` with the newest token already in it, `block_tables` `[S, max_blocks]` and
    `context_lens` `[S]` int32. A context of 0 is a padding row: its output is zeros. `window` and `soft_cap` as in
    reference.paged_attention. The pieces must fit `workspace` (see DecodeWorkspace.fits); sequences whose do not get
    NaN. Raises ValueError for arguments that do not fit each other. Safe in a CUDA graph.
    """
    check_attention(query, kv_layer, block_tables, context_lens, scale)
    num_sequences, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    require_tensor("query", query, (context_lens.shape[0], None, None))
    require_tensor("workspace", workspace.partial_out, (None, num_heads, head_dim), torch.float32)
    require(window >= 0 and soft_cap >= 0, f"window {window} and soft_cap {soft_cap} must not be negative")
    out = attention_output(query, out)
    if num_sequences == 0:
        return out
    heads = (num_heads, num_kv_heads, head_dim)
    config = decode_config(heads, block_size, window, soft_cap, query.dtype, capability_of(query.device))
    max_pieces = workspace.partial_out.shape[0]
    _attend_pieces[(num_multiprocessors(query.device) * config.programs_per_multiprocessor,)](
        query, kv_layer, block_tables, context_lens, out, workspace.partial_out, workspace.partial_lse,
        query.stride(0), kv_layer.stride(0), block_tables.stride(0), num_sequences, max_pieces, window,
        scale * LOG2_E, soft_cap, **config.constants, **compile_options(config.num_warps, config.num_stages),
    )  # fmt: skip
    _combine_pieces[(num_sequences, num_heads)](
        workspace.partial_out, workspace.partial_lse, context_lens, out, max_pieces, window,
        **config.combine_constants, **compile_options(COMBINE_WARPS, COMBINE_STAGES),
    )  # fmt: skip
    return out


def decode_attention_cost(context_lens: Sequence[int], heads: tuple[int, int, int], itemsize: int) -> OpCost:
    """One layer: keys and values of every context once, queries in, outputs out; `heads` is (H, KVH, D)."""
    num_heads, num_kv_heads, head_dim = heads
    tokens = sum(context_lens)
    moved = 2 * tokens * num_kv_heads + 2 * len(context_lens) * num_heads
    return OpCost(bytes=moved * head_dim * itemsize, flops=4 * tokens * num_heads * head_dim)


def kernel_specs(
    shape: ModelShape,
    capability: int,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    soft_cap: float = 0.0,
) -> list[KernelSpec]:
    """Both launches of one layer of this model."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    config = decode_config(heads, block_size, window, soft_cap, dtype, capability)
    element = "*" + TRITON_TYPES[dtype]
    ints = dict.fromkeys(
        ("query_stride", "block_stride", "table_stride", "num_sequences", "max_pieces", "window"), "i32"
    )
    tables = {"tables": "*i32", "context_lens": "*i32"}
    partials = {"partial_out": "*fp32", "partial_lse": "*fp32"}
    return [
        KernelSpec(
            "decode attention",
            _attend_pieces,
            {"query": element, "kv": element, "out": element}
            | tables
            | partials
            | ints
            | {"log2_scale": "fp32", "soft_cap": "fp32"},
            config.constants,
            config.num_warps,
            config.num_stages,
            aligned=("query_stride", "block_stride"),
            uses_tensor_cores=dtype != torch.float32,
            is_memory_bound=True,
        ),
        KernelSpec(
            "decode attention, combine",
            _combine_pieces,
            partials | {"context_lens": "*i32", "out": element, "max_pieces": "i32", "window": "i32"},
            config.combine_constants,
            COMBINE_WARPS,
            COMBINE_STAGES,
            is_memory_bound=True,
        ),
    ]
