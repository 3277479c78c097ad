"""KVCachePool: gather and scatter are exact for any range and touch nothing else; compared over the whole pool."""

import mmap
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import ConfigurationError, LocalProtocolError
from baton.core.layout import BLOCK_SIZES, BlockLayout
from baton.engine.kv_cache_pool import KVCachePool

LAYERS, HEADS, HEAD_DIM = 2, 3, 4


def make_pool(block_size: int, num_blocks: int, dtype: str = "float32") -> KVCachePool:
    return KVCachePool(BlockLayout(LAYERS, HEADS, HEAD_DIM, block_size, dtype), num_blocks)


def whole(pool: KVCachePool) -> torch.Tensor:
    """A copy of the pool, `[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]`."""
    return torch.stack([pool.layer(i) for i in range(pool.layout.num_layers)])


def fill(pool: KVCachePool) -> None:
    """Every number of the pool gets a value of its own (exact in fp16 only while there are few)."""
    values = torch.arange(whole(pool).numel(), dtype=torch.float32).view_as(whole(pool))
    for i in range(pool.layout.num_layers):
        pool.layer(i).copy_(values[i])


def expected_piece(pool: KVCachePool, table: list[int], start: int, stop: int) -> torch.Tensor:
    size = pool.layout.block_size
    tokens = [whole(pool)[:, table[t // size], :, :, t % size] for t in range(start, stop)]
    return torch.stack(tokens, 3)  # [num_layers, 2, num_kv_heads, num_tokens, head_dim]


def test_layout_of_the_memory() -> None:
    """A block is contiguous, and a layer's view has the strides of the whole."""
    pool = make_pool(block_size=8, num_blocks=5)
    layer = pool.layer(1)
    assert layer.shape == (5, 2, HEADS, 8, HEAD_DIM)
    assert layer.stride() == (LAYERS * 2 * HEADS * 8 * HEAD_DIM, HEADS * 8 * HEAD_DIM, 8 * HEAD_DIM, HEAD_DIM, 1)
    assert layer.storage_offset() == 2 * HEADS * 8 * HEAD_DIM
    assert layer.stride(0) * 4 == pool.layout.bytes_per_block
    assert not layer.any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_fresh_pool_takes_no_memory_before_it_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    pool = make_pool(block_size=128, num_blocks=20_000)
    assert pool.num_blocks * pool.layout.bytes_per_block > 400e6
    assert resident() - before < 40e6


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ConfigurationError, match="0 blocks holds nothing"):
        make_pool(block_size=16, num_blocks=0)


def test_a_pool_beyond_all_memory_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="bytes was refused by the system"):
        make_pool(block_size=128, num_blocks=2**40)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(block size, number of blocks, start, stop)"""
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    num_blocks = draw(st.integers(1, 6))
    start = draw(st.integers(0, num_blocks * block_size - 1))
    return block_size, num_blocks, start, draw(st.integers(start + 1, num_blocks * block_size))


@settings(deadline=None)
@given(ranges(), st.integers(0, 99))
def test_gather_any_range(drawn: tuple[int, int, int, int], seed: int) -> None:
    block_size, num_blocks, start, stop = drawn
    pool = make_pool(block_size, num_blocks + 2)
    fill(pool)
    table = random.Random(seed).sample(range(num_blocks + 2), num_blocks)
    size = (stop - start) * pool.layout.bytes_per_token
    out = bytearray(b"\xaa" * (size + 5))
    assert pool.gather(table, start, stop, memoryview(out)) == size
    piece = torch.frombuffer(out, dtype=torch.float32, count=size // 4)
    assert torch.equal(piece, expected_piece(pool, table, start, stop).flatten())
    assert out[size:] == b"\xaa" * 5  # nothing behind the piece


@settings(deadline=None)
@given(ranges(), st.sampled_from(BLOCK_SIZES), st.integers(0, 99))
def test_scatter_into_other_block_sizes(drawn: tuple[int, int, int, int], other_size: int, seed: int) -> None:
    """gather here, scatter there: exactly these slots change, to exactly these bytes (NaN patterns included)."""
    block_size, num_blocks, start, stop = drawn
    sender = make_pool(block_size, num_blocks)
    fill(sender)
    needed = -(-stop // other_size)
    receiver = make_pool(other_size, needed + 2)
    for i in range(LAYERS):
        receiver.layer(i).fill_(torch.nan)
    rng = random.Random(seed)
    sender_table = rng.sample(range(num_blocks), num_blocks)
    table = rng.sample(range(needed + 2), needed)
    expected = whole(receiver)
    piece = expected_piece(sender, sender_table, start, stop)
    for t in range(start, stop):
        expected[:, table[t // other_size], :, :, t % other_size] = piece[:, :, :, t - start]

    buffer = bytearray(sender.piece_bytes(stop - start))
    sender.gather(sender_table, start, stop, memoryview(buffer))
    receiver.scatter(table, start, stop, memoryview(bytes(buffer)))  # a read-only buffer, as from a socket
    torch.testing.assert_close(whole(receiver), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_copy_of_a_block_is_all_of_it_and_nothing_else(dtype: str) -> None:
    pool = make_pool(block_size=4, num_blocks=5, dtype=dtype)
    fill(pool)
    expected = whole(pool)
    expected[:, 1] = expected[:, 3]
    pool.copy_block(3, 1)
    assert torch.equal(whole(pool), expected)


@settings(deadline=None)
@given(ranges(), st.integers(0, 3), st.integers(1, 4))
def test_some_layers_alone(drawn: tuple[int, int, int, int], first: int, count: int) -> None:
    """A piece of layers is that part of the whole piece, and goes to these layers only."""
    block_size, num_blocks, start, stop = drawn
    layout = BlockLayout(4, HEADS, HEAD_DIM, block_size, "float32")
    last = min(first + count, 4)
    sender, receiver = KVCachePool(layout, num_blocks), KVCachePool(layout, num_blocks)
    fill(sender)
    table = list(range(num_blocks))[::-1]
    piece = expected_piece(sender, table, start, stop)[first:last].flatten()
    buffer = bytearray(sender.piece_bytes(stop - start, last - first))
    size = sender.gather(table, start, stop, memoryview(buffer), first_layer=first, last_layer=last)
    assert size == len(buffer) == piece.nbytes
    assert torch.equal(torch.frombuffer(buffer, dtype=torch.float32), piece)
    receiver.scatter(table, start, stop, memoryview(buffer), first_layer=first, last_layer=last)
    expected = whole(receiver)
    assert not expected[:first].any()
    assert not expected[last:].any()
    assert torch.equal(expected_piece(receiver, table, start, stop)[first:last].flatten(), piece)


@pytest.mark.parametrize("layers", [(2, 2), (-1, 1), (0, 3), (2, None)])
def test_layers_that_are_not_there_are_refused(layers: tuple[int, int | None]) -> None:
    pool = make_pool(4, 2)
    with pytest.raises(LocalProtocolError, match="are not in 2 layers"):
        pool.gather([0], 0, 2, memoryview(bytearray(10**4)), *layers)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype_and_uint8_tensors(dtype: str) -> None:
    pool, other = make_pool(4, 3, dtype), make_pool(2, 6, dtype)
    fill(pool)
    buffer = torch.zeros(pool.piece_bytes(9), dtype=torch.uint8)
    assert pool.gather([2, 0, 1], 1, 10, buffer) == 9 * pool.layout.bytes_per_token
    other.scatter([5, 3, 4, 0, 1], 1, 10, buffer)
    assert torch.equal(expected_piece(other, [5, 3, 4, 0, 1], 1, 10), expected_piece(pool, [2, 0, 1], 1, 10))


@pytest.mark.parametrize(
    ("start", "stop", "num_bytes", "message"),
    [
        (0, 9, 10**6, "tokens 0 to 9 are not in 2 blocks of 4"),
        (-1, 3, 10**6, "tokens -1 to 3 are not in"),
        (0, 8, 767, "8 tokens take 1536 bytes, the buffer has 767"),
        (3, 3, 10**6, "0 tokens take 0 bytes"),
        (5, 3, 10**6, "-2 tokens"),
    ],
)
def test_impossible_ranges_are_refused_before_anything_is_written(
    start: int, stop: int, num_bytes: int, message: str
) -> None:
    pool = make_pool(4, 2)
    buffer = bytearray(num_bytes)
    with pytest.raises(LocalProtocolError, match=message):
        pool.gather([0, 1], start, stop, memoryview(buffer))
    with pytest.raises(LocalProtocolError, match=message):
        pool.scatter([0, 1], start, stop, memoryview(b"\x01" * num_bytes))
    assert not any(buffer)
    assert not whole(pool).any()
