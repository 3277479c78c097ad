"""A pool of more than 2^31 elements: what lies in its last blocks is found there, and nothing else is touched."""

import torch

from baton.kernels.gpu.block_copy import gather_tokens, scatter_tokens
from baton.kernels.gpu.decode_attention import DecodeWorkspace, decode_attention
from baton.kernels.gpu.prefill_attention import prefill_attention
from baton.kernels.gpu.rope_store import norm_rope_store

from .compare import POISON, Bench, Cache, close, dense_attention, same

NUM_LAYERS, BLOCK_SIZE, HEAD_DIM = 4, 16, 128


def far_blocks(bench: Bench) -> str:
    """Store to, attend to, gather from and scatter to the last blocks of the last layer."""
    num_heads = 1 if bench.is_tiny else 8  # as many for keys
    per_block = NUM_LAYERS * 2 * num_heads * BLOCK_SIZE * HEAD_DIM
    num_blocks = 12 if bench.is_tiny else 2**31 // per_block + 12
    pool = bench.poisoned(num_blocks, NUM_LAYERS, 2, num_heads, BLOCK_SIZE, HEAD_DIM)
    layer, length = pool[:, -1], 3 * BLOCK_SIZE - 2
    table = [num_blocks - 1, num_blocks - 7, num_blocks - 3]
    heads = bench.random(length, num_heads + 2 * num_heads, HEAD_DIM)
    positions = torch.arange(length)
    slots = torch.tensor(table)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    ones, zeros = torch.ones(length, HEAD_DIM // 2, device=bench.device), torch.zeros(length, HEAD_DIM // 2)
    stored = heads[:, num_heads:].clone()
    norm_rope_store(heads, num_heads, None, None, 0.0, ones, zeros.to(bench.device), layer, slots.to(bench.device))
    kv = layer[table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]  # [2, KVH, length, D]
    same(kv.permute(2, 0, 1, 3).flatten(1, 2), stored, "what was stored")

    cache, query = Cache(layer, [table], [length]), heads[:, :num_heads]
    tables, lengths, scale = bench.ints(table).view(1, 3), bench.ints([length]), HEAD_DIM**-0.5
    want = dense_attention(query, cache, 0)
    got = prefill_attention(query, layer, tables, bench.ints([0, length]), lengths, length, scale=scale)
    error = close(bench, got, want, "prefill attention")
    workspace = DecodeWorkspace.allocate(1, length, num_heads, HEAD_DIM, bench.device)
    got = decode_attention(query[-1:], layer, tables, lengths, workspace, scale=scale)
    close(bench, got, want[-1:], "decode attention")

    size = NUM_LAYERS * 2 * num_heads * length * HEAD_DIM * bench.dtype.itemsize
    piece = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    device_table = bench.ints(table)
    gather_tokens(pool, device_table, 0, length, 0, NUM_LAYERS, piece)
    elements = piece.view(bench.dtype).view(NUM_LAYERS, 2, num_heads, length, HEAD_DIM)
    same(elements[-1], kv, "the gathered last layer")
    assert (elements[:-1] == POISON).all(), "the gathered other layers"
    moved = bench.ints([num_blocks - 2, num_blocks - 4, num_blocks - 6])
    scatter_tokens(pool, moved, 0, length, 0, NUM_LAYERS, piece)
    same(pool[num_blocks - 2, -1, :, :, 0], kv[:, :, 0], "the scattered first token")
    assert (pool[:8] == POISON).all() or bench.is_tiny, "an offset wrapped around into the first blocks"
    return f"{pool.numel() / 2**31:.2f} x 2^31 elements, error {error:.1e}"
