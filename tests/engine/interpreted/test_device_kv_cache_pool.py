"""DeviceKVCachePool copies exactly what the pool in the host's memory copies, over the whole pool."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import LocalProtocolError
from baton.core.layout import BlockLayout
from baton.engine.device_kv_cache_pool import DeviceKVCachePool
from baton.engine.kv_cache_pool import KVCachePool
from baton.kernels import reference

LAYERS, HEADS, HEAD_DIM, NUM_BLOCKS = 3, 2, 8, 6
CPU = torch.device("cpu")


def filled(pool: KVCachePool) -> KVCachePool:
    generator = torch.Generator().manual_seed(2)
    for layer in pool.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return pool


def pools(block_size: int, dtype: str = "float32") -> tuple[KVCachePool, KVCachePool]:
    layout = BlockLayout(LAYERS, HEADS, HEAD_DIM, block_size, dtype)
    return filled(DeviceKVCachePool(layout, NUM_BLOCKS, CPU)), filled(KVCachePool(layout, NUM_BLOCKS))


@settings(deadline=None, max_examples=12, derandomize=True)
@given(st.data())
def test_any_range_of_tokens_and_layers(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    ours, theirs = pools(block_size, data.draw(st.sampled_from(["float32", "float16"])))
    table = random.Random(data.draw(st.integers(0, 99))).sample(range(NUM_BLOCKS), 4)
    start = data.draw(st.integers(0, 4 * block_size - 1))
    stop = data.draw(st.integers(start + 1, 4 * block_size))
    first = data.draw(st.integers(0, LAYERS - 1))
    last = data.draw(st.none() | st.integers(first + 1, LAYERS))
    size = ours.piece_bytes(stop - start, (last or LAYERS) - first)
    if data.draw(st.booleans()):  # a buffer that kernels cannot reach: through the staging buffer
        ours._is_here = lambda buffer: False  # type: ignore[method-assign]

    pieces = [bytearray(b"\xaa" * (size + 3)) for _ in range(2)]
    for pool, piece in zip((ours, theirs), pieces, strict=True):
        assert pool.gather(table, start, stop, memoryview(piece), first, last) == size
    assert pieces[0] == pieces[1]

    piece = torch.randint(0, 120, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    ours.scatter(table, start, stop, piece, first, last)
    theirs.scatter(table, start, stop, memoryview(piece.numpy()), first, last)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(a, b)


def test_a_copy_of_a_block() -> None:
    ours, theirs = pools(4)
    for pool in (ours, theirs):
        pool.copy_block(2, 5)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[5], a[2])


def test_the_checksum_is_the_definition() -> None:
    pool, _ = pools(4)
    piece = torch.arange(77, dtype=torch.uint8)
    assert pool.checksum(piece) == int(reference.checksum(piece))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 9, 10**6), "tokens 0 to 9 are not in 2 blocks of 4"),
        ((-1, 3, 10**6), "tokens -1 to 3 are not in"),
        ((0, 8, 5), "8 tokens take .* bytes, the buffer has 5"),
        ((3, 3, 10**6), "0 tokens take 0 bytes"),
        ((0, 2, 10**6, 2, 2), "layers 2 to 2 are not in 3 layers"),
        ((0, 2, 10**6, 0, 4), "layers 0 to 4 are not in 3 layers"),
        ((0, 2, 10**6, -1, 2), "layers -1 to 2 are not in 3 layers"),
    ],
)
def test_impossible_ranges_are_refused_by_both(arguments: tuple[int, ...], message: str) -> None:
    start, stop, num_bytes, *layers = arguments
    for pool in pools(4):
        before = [layer.clone() for layer in pool.layers]
        buffer = bytearray(num_bytes)
        with pytest.raises(LocalProtocolError, match=message):
            pool.gather([0, 1], start, stop, memoryview(buffer), *layers)
        with pytest.raises(LocalProtocolError, match=message):
            pool.scatter([0, 1], start, stop, memoryview(b"\x01" * num_bytes), *layers)
        assert not any(buffer)
        assert all(torch.equal(a, b) for a, b in zip(before, pool.layers, strict=True))
