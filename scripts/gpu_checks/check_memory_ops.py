"""Norms, activation, rope and store, block copies and checksums on the device against their definitions."""

import torch

from baton.kernels import reference
from baton.kernels.gpu.activation import gelu_and_mul, silu_and_mul
from baton.kernels.gpu.block_copy import gather_tokens, scatter_tokens
from baton.kernels.gpu.checksum import checksum
from baton.kernels.gpu.norm import add_rms_norm, rms_norm
from baton.kernels.gpu.rope_store import norm_rope_store

from .compare import Bench, close, same


def norms(bench: Bench) -> str:
    worst = 0.0
    for rows, size in ((5, 123), (3, 64)) if bench.is_tiny else ((5, 123), (1, 576), (257, 4096), (3, 16385)):
        x, residual, weight = bench.random(rows, size), bench.random(rows, size), bench.random(size)
        want = reference.rms_norm(x.float(), weight.float(), 1e-5)
        got = rms_norm(x, weight, 1e-5, out=bench.poisoned(rows, size))
        worst = max(worst, close(bench, got, want, f"rms norm of {size}"))
        same(rms_norm(x[1:2], weight, 1e-5), got[1:2], f"a row of {size} alone") if rows > 1 else None
        total, twin = x + residual, residual.clone()
        got = add_rms_norm(x, twin, weight, 1e-5, out=bench.poisoned(rows, size))
        same(twin, total, "the sum of the residual stream")
        worst = max(worst, close(bench, got, reference.rms_norm(total.float(), weight.float(), 1e-5), "add, rms norm"))
    return f"error {worst:.1e}"


def activation(bench: Bench) -> str:
    worst = 0.0
    for rows, size in ((5, 123), (2, 64)) if bench.is_tiny else ((5, 123), (1, 768), (257, 14336)):
        gate_up = 4 * bench.random(rows, 2 * size)
        got = silu_and_mul(gate_up, out=bench.poisoned(rows, size))
        worst = max(worst, close(bench, got, reference.silu_and_mul(gate_up.float()), f"silu and mul of {size}"))
        got = gelu_and_mul(gate_up, out=bench.poisoned(rows, size))
        worst = max(worst, close(bench, got, reference.gelu_and_mul(gate_up.float()), f"gelu and mul of {size}"))
    return f"error {worst:.1e}"


def rope_store(bench: Bench) -> str:
    """Queries, and the whole cache: what is no slot of a token keeps its bits."""
    worst = 0.0
    shapes = ((4, 2, 16, 4, True), (3, 1, 24, 8, False))
    for num_heads, num_kv_heads, head_dim, block_size, has_norm in (
        shapes if bench.is_tiny else (*shapes, (32, 8, 128, 16, False), (32, 4, 128, 16, True), (10, 2, 80, 128, True))
    ):
        count, num_blocks = 9, 40 // block_size + 1
        heads = bench.random(count, num_heads + 2 * num_kv_heads, head_dim)
        kv = bench.poisoned(num_blocks, 2, num_kv_heads, block_size, head_dim)
        slots = bench.ints(torch.randperm(num_blocks * block_size)[:count].tolist(), torch.int64)
        slots[2] = -1
        weights = [bench.random(head_dim, dtype=torch.float32) if has_norm else None for _ in range(2)]
        angles = 6 * torch.rand(count, head_dim // 2, device=bench.device)
        want_heads, want_kv = heads.float().clone(), kv.float().clone()
        reference.norm_rope_store(
            want_heads, num_heads, *weights, 1e-5, angles.cos(), angles.sin(), want_kv, slots.tolist()
        )
        before = kv.clone()
        norm_rope_store(heads, num_heads, *weights, 1e-5, angles.cos(), angles.sin(), kv, slots)
        worst = max(worst, close(bench, heads[:, :num_heads], want_heads[:, :num_heads], "queries"))
        by_slot, want_by_slot, unchanged = (t.permute(0, 3, 1, 2, 4).flatten(0, 1) for t in (kv, want_kv, before))
        stored = slots[slots >= 0]  # views are [slots, 2, KVH, D]
        worst = max(worst, close(bench, by_slot[stored, 0], want_by_slot[stored, 0], "keys"))
        same(by_slot[stored, 1], want_by_slot[stored, 1].to(bench.dtype), "values")
        others = torch.ones(len(by_slot), dtype=torch.bool, device=bench.device)
        others[stored] = False
        same(by_slot[others], unchanged[others], "slots of nobody")
    return f"error {worst:.1e}"


def block_copies(bench: Bench) -> str:
    """Ranges that begin and end inside blocks, some layers; the whole pool is compared."""
    num_layers, num_kv_heads, block_size, head_dim = (3, 2, 4, 8) if bench.is_tiny else (5, 3, 16, 80)
    pool = bench.random(9, num_layers, 2, num_kv_heads, block_size, head_dim)
    table = torch.randperm(9)[:6].tolist()
    device_table = bench.ints(table)
    for start, stop, first, last in ((0, 1, 0, num_layers), (3, 4 * block_size + 1, 1, 3), (block_size, 20, 0, 1)):
        planes = (last - first) * 2 * num_kv_heads
        size = planes * (stop - start) * head_dim * bench.dtype.itemsize
        piece = torch.full((size,), 0xAB, dtype=torch.uint8, device=bench.device)
        want = piece.clone()
        reference.gather_tokens(pool, table, start, stop, first, last, want)
        gather_tokens(pool, device_table, start, stop, first, last, piece)
        same(piece, want, f"gather of tokens {start} to {stop}")
        target, want_target = (torch.full_like(pool, -5.0) for _ in range(2))
        reference.scatter_tokens(want_target, table, start, stop, first, last, piece)
        scatter_tokens(target, device_table, start, stop, first, last, piece)
        same(target, want_target, f"scatter of tokens {start} to {stop}")
    return "exact"


def checksums(bench: Bench) -> str:
    for size in (0, 1, 5, 4096, 33333) if bench.is_tiny else (0, 1, 5, 2**21, 2**21 + 3, 2**26):
        buffer = torch.randint(256, (size,), dtype=torch.uint8, device=bench.device)
        want = int(reference.checksum(buffer.cpu()))
        assert int(checksum(buffer)) == want, f"{size} bytes"
        if size > 8:
            buffer[size // 2] ^= 1
            assert int(checksum(buffer)) != want, "a changed bit was not seen"
    return "exact"
