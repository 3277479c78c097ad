"""The hand-over's copies between blocks of the cache and a contiguous piece: one pass of plain loads and stores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .cost import OpCost
from .launching import compile_options, require, require_tensor
from .model_shapes import ModelShape

# A copy runs beside the compute of the next chunk, and what it writes to (NVLink, PCIe) is slower than memory: few big
# programs leave the other multiprocessors to the products. 32 of them keep 2 MiB of loads in flight.
_MAX_PROGRAMS = 32
_NUM_WARPS = 32
_TILE_WORDS = 16384
_WORDS = {4: tl.int32, 2: tl.int16, 1: tl.int8}  # word size in bytes |-> type


@triton.jit(do_not_specialize=["table_ptr", "first_plane", "num_rows", "num_tokens", "start"])
def _copy_tokens(  # type: ignore[no-untyped-def]
    blocks_ptr,  # words of [num_blocks, planes of a block, BLOCK_SIZE, ROW]
    table_ptr,  # block ids of the sequence
    piece_ptr,  # words of [planes, num_tokens, ROW]
    first_plane,
    num_rows,  # planes * num_tokens
    num_tokens,
    start,
    block_stride,
    IS_GATHER: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_ROW: tl.constexpr,
):
    """A plane is one layer's keys or values of one head; a row is one token of a plane, ROW words."""
    word = tl.arange(0, TILE_ROW)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, TILE_ROWS), tl.num_programs(0)):
        row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        in_piece = row < num_rows
        token = start + row % num_tokens
        plane = first_plane + row // num_tokens
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=in_piece, other=0).to(tl.int64)
        slot = (plane * BLOCK_SIZE + token % BLOCK_SIZE).to(tl.int64)
        in_blocks = blocks_ptr + (block * block_stride + slot * ROW)[:, None] + word[None, :]
        in_contiguous = piece_ptr + (row.to(tl.int64) * ROW)[:, None] + word[None, :]
        mask = in_piece[:, None] & (word < ROW)[None, :]
        if IS_GATHER:
            tl.store(in_contiguous, tl.load(in_blocks, mask=mask, other=0), mask=mask)
        else:
            tl.store(in_blocks, tl.load(in_contiguous, mask=mask, other=0), mask=mask)


def copy_config(row_words: int) -> dict[str, int]:
    """Tile for rows (a token of one head) of `row_words` words: 64 KiB in 16-byte words a thread, in bf16 four."""
    tile_row = triton.next_power_of_2(row_words)
    return {"ROW": row_words, "TILE_ROWS": max(_TILE_WORDS // tile_row, 1), "TILE_ROW": tile_row}


def gather_tokens(
    blocks: Tensor, block_table: Tensor, start: int, stop: int, first_layer: int, last_layer: int, out: Tensor
) -> None:
    """`reference.gather_tokens`: tokens `start` to `stop`, layers `first_layer` to `last_layer`, into the piece `out`.

    `blocks` is the pool `[num_blocks, num_layers, 2, KVH, block_size, D]`, contiguous, any dtype; `block_table` the
    sequence's block ids, int32 or int64, on the device; `out` uint8, contiguous, exactly the piece's bytes
    `[last_layer - first_layer, 2, KVH, stop - start, D]`. `out` may be another device's memory mapped into this one.
    """
    _launch(blocks, block_table, (start, stop), (first_layer, last_layer), "out", out)


def scatter_tokens(
    blocks: Tensor, block_table: Tensor, start: int, stop: int, first_layer: int, last_layer: int, piece: Tensor
) -> None:
    """`reference.scatter_tokens`: the way back; arguments as of `gather_tokens`. No other slot is touched."""
    _launch(blocks, block_table, (start, stop), (first_layer, last_layer), "piece", piece)


def _launch(
    blocks: Tensor, block_table: Tensor, tokens: tuple[int, int], layers: tuple[int, int], name: str, buffer: Tensor
) -> None:
    num_rows = _check(blocks, block_table, tokens, layers, name, buffer)
    if num_rows == 0:
        return
    planes_per_layer, block_size = blocks.shape[2] * blocks.shape[3], blocks.shape[4]
    row_bytes = blocks.shape[5] * blocks.element_size()
    # The widest word of which both ends are multiples; triton makes four of them one 16-byte access where it can.
    size = next(s for s in _WORDS if (row_bytes | blocks.data_ptr() | buffer.data_ptr()) % s == 0)
    config = copy_config(row_bytes // size)
    num_programs = min(triton.cdiv(num_rows, config["TILE_ROWS"]), _MAX_PROGRAMS)
    _copy_tokens[(num_programs,)](
        triton.reinterpret(blocks, _WORDS[size]),
        block_table,
        triton.reinterpret(buffer, _WORDS[size]),
        layers[0] * planes_per_layer,
        num_rows,
        tokens[1] - tokens[0],
        tokens[0],
        blocks.shape[1] * planes_per_layer * block_size * config["ROW"],
        IS_GATHER=name == "out",
        BLOCK_SIZE=block_size,
        **config,
        **compile_options(_NUM_WARPS, 1),
    )


def _check(
    blocks: Tensor, block_table: Tensor, tokens: tuple[int, int], layers: tuple[int, int], name: str, buffer: Tensor
) -> int:
    """Rows to copy; ValueError for what would read or write beside the blocks or the piece."""
    require_tensor("blocks", blocks, (None, None, 2, None, None, None))
    _, num_layers, _, num_kv_heads, block_size, head_dim = blocks.shape
    require(blocks.is_contiguous(), "blocks is not contiguous")
    require_tensor("block_table", block_table, (None,), torch.int32, torch.int64)
    require(block_table.is_contiguous(), "block_table is not contiguous")
    start, stop = tokens
    capacity = block_table.numel() * block_size
    require(0 <= start <= stop <= capacity, f"tokens {start} to {stop} are not in a block_table of {capacity} slots")
    first, last = layers
    require(0 <= first <= last <= num_layers, f"layers {first} to {last} are not in blocks of {num_layers} layers")
    num_rows = (last - first) * 2 * num_kv_heads * (stop - start)
    require_tensor(name, buffer, (num_rows * head_dim * blocks.element_size(),), torch.uint8)
    require(buffer.is_contiguous(), f"{name} is not contiguous")
    require(num_rows < 1 << 30, f"{name} has {num_rows} rows, fewer than 2^30 are copied at once")
    return num_rows


def copy_cost(num_tokens: int, num_layers: int, num_kv_heads: int, head_dim: int, item_size: int) -> OpCost:
    """Keys and values of those tokens and layers read once and written once."""
    return OpCost(2 * 2 * item_size * num_tokens * num_layers * num_kv_heads * head_dim, 0)


def kernel_specs(shape: ModelShape, block_size: int = 16) -> list[KernelSpec]:
    """Both directions for a bfloat16 cache: two elements are a 4-byte word."""
    pointers = {"blocks_ptr": "*i32", "table_ptr": "*i32", "piece_ptr": "*i32"}
    sizes = ("first_plane", "num_rows", "num_tokens", "start", "block_stride")
    return [
        KernelSpec(
            name=name,
            function=_copy_tokens,
            arguments={**pointers, **dict.fromkeys(sizes, "i32")},
            constants={"IS_GATHER": name == "gather", "BLOCK_SIZE": block_size, **copy_config(shape.head_dim // 2)},
            num_warps=_NUM_WARPS,
            num_stages=1,
            aligned=("block_stride",),
            is_memory_bound=True,
        )
        for name in ("gather", "scatter")
    ]
