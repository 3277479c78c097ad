"""Definitions of the copies between the blocks of the cache and a contiguous piece."""

from collections.abc import Sequence

from torch import Tensor


def gather_tokens(
    blocks: Tensor, block_table: Sequence[int], start: int, stop: int, first_layer: int, last_layer: int, out: Tensor
) -> None:
    """Copy the tokens `start` to `stop` of a sequence, layers `first_layer` to `last_layer`, into the piece `out`.

    `blocks` is `[num_blocks, num_layers, 2, KVH, block_size, D]`; a piece has the bytes of a contiguous
    `[last_layer - first_layer, 2, KVH, stop - start, D]` of the same dtype.
    """
    piece = _piece(blocks, start, stop, first_layer, last_layer, out)
    for token in range(start, stop):
        block, offset = block_table[token // blocks.shape[4]], token % blocks.shape[4]
        piece[:, :, :, token - start] = blocks[block, first_layer:last_layer, :, :, offset]


def scatter_tokens(
    blocks: Tensor, block_table: Sequence[int], start: int, stop: int, first_layer: int, last_layer: int, piece: Tensor
) -> None:
    """The way back: copy a piece into the slots of those tokens and layers; no other slot is touched."""
    source = _piece(blocks, start, stop, first_layer, last_layer, piece)
    for token in range(start, stop):
        block, offset = block_table[token // blocks.shape[4]], token % blocks.shape[4]
        blocks[block, first_layer:last_layer, :, :, offset] = source[:, :, :, token - start]


def _piece(blocks: Tensor, start: int, stop: int, first_layer: int, last_layer: int, buffer: Tensor) -> Tensor:
    _, _, sides, num_kv_heads, _, head_dim = blocks.shape
    return buffer.view(blocks.dtype).view(last_layer - first_layer, sides, num_kv_heads, stop - start, head_dim)
