"""Copies between blocks and pieces under the interpreter: exact, and nothing beside them is touched."""

import pytest
import torch

from baton.kernels import reference
from baton.kernels.gpu.block_copy import copy_config, copy_cost, gather_tokens, scatter_tokens

LAYERS, KV_HEADS = 3, 2


def pool(num_blocks: int, block_size: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Every element has its own bits."""
    shape = (num_blocks, LAYERS, 2, KV_HEADS, block_size, head_dim)
    count = torch.Size(shape).numel()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return torch.arange(1, count + 1).to(bits).view(dtype).view(shape)


def piece_bytes(blocks: torch.Tensor, num_tokens: int, num_layers: int) -> int:
    return num_layers * 2 * KV_HEADS * num_tokens * blocks.shape[5] * blocks.element_size()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 16), (2, 80), (4, 5), (16, 128), (128, 5)])
def test_gather_and_scatter(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    blocks = pool(6, block_size, head_dim, dtype)
    table = torch.tensor([5, 0, 3, 2])
    for start, stop, first, last in ((0, 4 * block_size, 0, 3), (block_size // 2, 2 * block_size + 1, 1, 2)):
        size = piece_bytes(blocks, stop - start, last - first)
        out = torch.full((size + 32,), 99, dtype=torch.uint8)
        expected = out.clone()
        gather_tokens(blocks, table, start, stop, first, last, out[16:-16])
        reference.gather_tokens(blocks, table.tolist(), start, stop, first, last, expected[16:-16])
        assert torch.equal(out, expected)

        target = torch.zeros_like(blocks)
        scatter_tokens(target, table.int(), start, stop, first, last, out[16:-16])
        expected_target = torch.zeros_like(blocks)
        reference.scatter_tokens(expected_target, table.tolist(), start, stop, first, last, out[16:-16])
        assert torch.equal(bits(target), bits(expected_target))


def test_by_hand() -> None:
    """Blocks of 2 tokens, one layer, one head of one value: token t of the sequence holds 10 * block + offset."""
    blocks = torch.tensor([[0, 1], [10, 11], [20, 21]], dtype=torch.int32).view(3, 1, 1, 1, 2, 1)
    blocks = torch.cat((blocks, blocks + 100), 2)  # keys, values
    out = torch.empty(4 * 2 * 3, dtype=torch.uint8)
    gather_tokens(blocks, torch.tensor([2, 0, 1]), 1, 4, 0, 1, out)
    assert out.view(torch.int32).tolist() == [21, 0, 1, 121, 100, 101]
    scatter_tokens(blocks, torch.tensor([0, 1]), 0, 3, 0, 1, out)
    assert blocks[:, 0, 0, 0, :, 0].tolist() == [[21, 0], [1, 11], [20, 21]]
    assert blocks[:, 0, 1, 0, :, 0].tolist() == [[121, 100], [101, 111], [120, 121]]


@pytest.mark.parametrize("shift", [1, 2, 3, 4, 8])
def test_a_piece_at_any_address(shift: int) -> None:
    blocks = pool(3, 4, 8, torch.float16)
    size = piece_bytes(blocks, 7, LAYERS)
    aligned, shifted = torch.zeros(size, dtype=torch.uint8), torch.zeros(size + shift, dtype=torch.uint8)[shift:]
    table = torch.tensor([2, 1], dtype=torch.int32)
    gather_tokens(blocks, table, 1, 8, 0, LAYERS, aligned)
    gather_tokens(blocks, table, 1, 8, 0, LAYERS, shifted)
    assert torch.equal(aligned, shifted)


def test_more_tiles_than_programs() -> None:
    """40 tiles of 4 rows of 4096 words: every program but the last ones has two."""
    blocks = pool(20, 1, 4096, torch.float32)[:, :1].contiguous()
    table = torch.arange(19, -1, -1)[:40]
    table = torch.cat((table, table))
    out, expected = (torch.zeros(piece_bytes(blocks, 39, 1), dtype=torch.uint8) for _ in range(2))
    gather_tokens(blocks, table, 0, 39, 0, 1, out)
    reference.gather_tokens(blocks, table.tolist(), 0, 39, 0, 1, expected)
    assert torch.equal(out, expected)


def test_blocks_past_two_to_the_31_words(sparse_buffer) -> None:
    """600 blocks of 2^24 bytes; the last ones lie past 2^31 words of 4 bytes."""
    shape = (600, 1, 2, 1, 128, 1 << 15)
    blocks = sparse_buffer(torch.Size(shape).numel(), torch.int16).view(shape)
    blocks[599, 0, :, 0, 127] = torch.arange(1 << 16).to(torch.int16).view(2, -1)
    out = torch.zeros(2 << 16, dtype=torch.uint8)
    gather_tokens(blocks, torch.tensor([599], dtype=torch.int32), 127, 128, 0, 1, out)
    assert out.view(torch.int16).tolist() == blocks[599, 0, :, 0, 127].flatten().tolist()
    scatter_tokens(blocks, torch.tensor([300, 598], dtype=torch.int32), 255, 256, 0, 1, out)
    assert torch.equal(blocks[598, 0, :, 0, 127], blocks[599, 0, :, 0, 127])
    assert blocks[598, 0, :, 0, 126].count_nonzero() == 0


def test_nothing_to_copy() -> None:
    blocks, table, empty = pool(2, 4, 8, torch.float16), torch.tensor([1]), torch.empty(0, dtype=torch.uint8)
    gather_tokens(blocks, table, 2, 2, 0, LAYERS, empty)
    scatter_tokens(blocks, table, 0, 4, 1, 1, empty)


@pytest.mark.parametrize(
    ("tokens", "layers", "num_bytes", "message"),
    [
        ((0, 9), (0, 3), 9 * 192, "tokens 0 to 9 are not in a block_table of 8 slots"),
        ((-1, 2), (0, 3), 3 * 192, "tokens -1 to 2"),
        ((3, 2), (0, 3), 0, "tokens 3 to 2"),
        ((0, 2), (0, 4), 2 * 256, "layers 0 to 4 are not in blocks of 3 layers"),
        ((0, 2), (2, 1), 0, "layers 2 to 1"),
        ((0, 2), (0, 3), 2 * 192 - 1, r"has shape \[383\]"),
    ],
)
def test_a_wrong_range_is_named(tokens, layers, num_bytes: int, message: str) -> None:
    blocks, table = pool(3, 4, 8, torch.float16), torch.tensor([1, 2])
    for copy in (gather_tokens, scatter_tokens):
        with pytest.raises(ValueError, match=message):
            copy(blocks, table, *tokens, *layers, torch.zeros(num_bytes, dtype=torch.uint8))


def test_a_wrong_tensor_is_named() -> None:
    blocks, table, piece = pool(3, 4, 8, torch.float16), torch.tensor([1]), torch.zeros(192, dtype=torch.uint8)
    with pytest.raises(ValueError, match="blocks is not contiguous"):
        gather_tokens(blocks.transpose(3, 4), table, 0, 1, 0, 3, piece)
    with pytest.raises(ValueError, match=r"block_table is torch\.int16"):
        gather_tokens(blocks, table.to(torch.int16), 0, 1, 0, 3, piece)
    with pytest.raises(ValueError, match=r"piece is torch\.float16"):
        scatter_tokens(blocks, table, 0, 1, 0, 3, piece.half())
    with pytest.raises(ValueError, match="out is not contiguous"):
        gather_tokens(blocks, table, 0, 1, 0, 3, torch.zeros(384, dtype=torch.uint8)[::2])


def test_configuration_and_cost_by_hand() -> None:
    assert copy_config(64) == {"ROW": 64, "TILE_ROWS": 256, "TILE_ROW": 64}
    assert copy_config(40) == {"ROW": 40, "TILE_ROWS": 256, "TILE_ROW": 64}
    # 10 tokens of 3 layers, keys and values of 2 heads of 8 bfloat16 values, in and out
    assert copy_cost(10, 3, 2, 8, 2).bytes == 10 * 3 * 2 * 2 * 8 * 2 * 2
