"""Attention on the device against its definition, and bit for bit against itself in other company."""

import torch

from baton.kernels.gpu.decode_attention import DecodeWorkspace, decode_attention
from baton.kernels.gpu.prefill_attention import prefill_attention

from .compare import POISON, Bench, Cache, close, dense_attention, make_cache, same

# query heads, KV heads, head_dim, block size, window, soft cap
SHAPES = (
    (32, 8, 128, 16, 0, 0.0),
    (16, 8, 128, 16, 0, 0.0),
    (32, 4, 128, 16, 0, 0.0),
    (9, 3, 64, 1, 0, 0.0),
    (10, 2, 80, 32, 0, 0.0),
    (7, 1, 96, 128, 0, 0.0),
    (8, 8, 256, 8, 0, 30.0),
    (32, 2, 128, 16, 100, 0.0),
)
TINY_SHAPES = ((4, 2, 16, 4, 0, 0.0), (6, 2, 24, 8, 7, 30.0))


def decode(bench: Bench) -> str:
    """Mixed lengths, a padding row, NaN outside of the contexts; alone and in the batch."""
    worst = 0.0
    for num_heads, num_kv_heads, head_dim, block_size, window, soft_cap in TINY_SHAPES if bench.is_tiny else SHAPES:
        lengths = [1, 5, 33] if bench.is_tiny else [1, 7, 256, 257, 1000, 2049, 5000]
        cache = make_cache(bench, lengths, num_kv_heads, block_size, head_dim)
        fused = bench.random(len(lengths) + 1, num_heads + 2 * num_kv_heads, head_dim)
        query, options = fused[:, :num_heads], {"window": window, "soft_cap": soft_cap}
        got = _decode(bench, query, cache, options)
        for i in range(len(lengths)):
            want = dense_attention(query[i : i + 1], cache, i, window=window, soft_cap=soft_cap)
            worst = max(worst, close(bench, got[i : i + 1], want, f"sequence of {lengths[i]} of {num_heads} heads"))
            if bench.is_tiny and i < len(lengths) - 1:
                continue
            alone = Cache(cache.kv, [cache.tables[i]], [lengths[i]])
            same(_decode(bench, query[i : i + 2], alone, options)[:1], got[i : i + 1], f"alone, {lengths[i]} tokens")
        assert not got[len(lengths) :].any(), "a padding row's output is not 0"
    return f"error {worst:.1e}"


def _decode(bench: Bench, query: torch.Tensor, cache: Cache, options: dict[str, float]) -> torch.Tensor:
    """The last row of `query` is padding."""
    count, num_heads, head_dim = query.shape
    tables = torch.cat((cache.device_tables(bench), cache.device_tables(bench)[:1]))
    lengths = bench.ints([*cache.lengths, 0])
    workspace = DecodeWorkspace.allocate(count, sum(cache.lengths), num_heads, head_dim, bench.device)
    out = bench.poisoned(count, num_heads, head_dim)
    scale = head_dim**-0.5
    return decode_attention(query, cache.kv, tables, lengths, workspace, scale=scale, out=out, **options)


def prefill(bench: Bench) -> str:
    """Chunks over cached prefixes, and one prompt cut in several ways."""
    worst = 0.0
    for num_heads, num_kv_heads, head_dim, block_size, window, soft_cap in TINY_SHAPES if bench.is_tiny else SHAPES:
        lengths, now = ([5, 20], [1, 6]) if bench.is_tiny else ([5, 123, 700, 1500], [5, 123, 129, 1])
        cache = make_cache(bench, lengths, num_kv_heads, block_size, head_dim)
        query, options = bench.random(sum(now), num_heads, head_dim), {"window": window, "soft_cap": soft_cap}
        got = _prefill(bench, query, cache, now, options)
        first = 0
        for i, count in enumerate(now):
            rows = slice(first, first + count)
            want = dense_attention(query[rows], cache, i, window=window, soft_cap=soft_cap)
            worst = max(worst, close(bench, got[rows], want, f"{count} of {lengths[i]} tokens of {num_heads} heads"))
            _cut(bench, query[rows], Cache(cache.kv, [cache.tables[i]], [lengths[i]]), got[rows], options)
            first += count
    return f"error {worst:.1e}"


def _cut(bench: Bench, query: torch.Tensor, cache: Cache, want: torch.Tensor, options: dict[str, float]) -> None:
    """The same tokens in two chunks, without company."""
    half, length = len(query) // 2, cache.lengths[0]
    if half == 0:
        return
    before = Cache(cache.kv, cache.tables, [length - len(query) + half])
    parts = [_prefill(bench, query[:half], before, [half], options)]
    parts.append(_prefill(bench, query[half:], cache, [len(query) - half], options))
    same(torch.cat(parts), want, f"{len(query)} tokens in two chunks")


def _prefill(
    bench: Bench, query: torch.Tensor, cache: Cache, now: list[int], options: dict[str, float]
) -> torch.Tensor:
    starts = bench.ints([sum(now[:i]) for i in range(len(now) + 1)])
    out = bench.poisoned(len(query) + 1, *query.shape[1:])
    scale = query.shape[2] ** -0.5
    tables, lengths = cache.device_tables(bench), bench.ints(cache.lengths)
    prefill_attention(query, cache.kv, tables, starts, lengths, max(now), scale=scale, out=out[: len(query)], **options)
    assert (out[-1] == POISON).all(), "rows behind the last sequence were written"
    return out[: len(query)]
