"""How results are compared, and the random operands of the checks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
POISON = -77.0


@dataclass(frozen=True)
class Bench:
    """Where and in which numbers a check runs; `is_tiny`: under the interpreter."""

    device: torch.device
    dtype: torch.dtype
    is_tiny: bool

    def random(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(size, device=self.device).to(dtype or self.dtype)

    def poisoned(self, *size: int) -> Tensor:
        return torch.full(size, POISON, device=self.device, dtype=self.dtype)

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def error_of(got: Tensor, want: Tensor) -> float:
    """‖got - want‖ / ‖want‖ in float64; infinite for what is not a number."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert got.shape == want.shape, f"shape {list(got.shape)}, {list(want.shape)} is wanted"
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def close(bench: Bench, got: Tensor, want: Tensor, what: str) -> float:
    error = error_of(got, want)
    assert error <= TOLERANCES[bench.dtype], f"{what}: error {error:.2e}, {TOLERANCES[bench.dtype]:.0e} is allowed"
    return error


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Bit for bit, NaN included."""
    got, want = got.contiguous().cpu(), want.contiguous().cpu()
    equal = torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert equal, f"{what}: {int((got != want).sum())} of {got.numel()} elements differ"


@dataclass(frozen=True)
class Cache:
    """Sequences at scattered blocks of a cache whose unused slots hold NaN."""

    kv: Tensor  # [num_blocks, 2, KVH, block_size, D]
    tables: list[list[int]]
    lengths: list[int]

    def device_tables(self, bench: Bench) -> Tensor:
        width = max(len(table) for table in self.tables)
        return bench.ints([t for table in self.tables for t in table + [0] * (width - len(table))]).view(-1, width)


def make_cache(bench: Bench, lengths: list[int], num_kv_heads: int, block_size: int, head_dim: int) -> Cache:
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks).tolist()
    kv = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), float("nan"))
    tables = []
    for length, count in zip(lengths, needed, strict=True):
        table, order = order[:count], order[count:]
        for token in range(length):
            kv[table[token // block_size], :, :, token % block_size] = torch.randn(2, num_kv_heads, head_dim)
        tables.append(table)
    return Cache(kv.to(bench.device, bench.dtype), tables, lengths)


def dense_attention(query: Tensor, cache: Cache, index: int, *, window: int = 0, soft_cap: float = 0.0) -> Tensor:
    """One sequence's newest tokens `[n, H, D]` in float32, all at once: the definition without its loops."""
    length, table, block_size = cache.lengths[index], cache.tables[index], cache.kv.shape[3]
    kv = cache.kv[table].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]  # [2, KVH, length, D]
    assert kv.shape[2] <= len(table) * block_size
    key, value = kv.repeat_interleave(query.shape[1] // kv.shape[1], 1)
    scores = torch.einsum("nhd,htd->hnt", query.float(), key) * query.shape[2] ** -0.5
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    rows = torch.arange(length - len(query), length, device=query.device).unsqueeze(1)
    tokens = torch.arange(length, device=query.device).unsqueeze(0)
    hidden = (tokens > rows) | (tokens <= rows - window if window else tokens < 0)
    return torch.einsum("hnt,htd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)
