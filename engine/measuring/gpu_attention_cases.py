"""Attention of the Triton kernels over scattered blocks, with torch's own over contiguous keys beside it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.gpu.decode_attention import DecodeWorkspace, decode_attention, decode_attention_cost
from ...kernels.gpu.model_shapes import ModelShape
from ...kernels.gpu.prefill_attention import prefill_attention, prefill_attention_cost
from .case import Case, Run

DECODE_GOAL = 0.90  # of copy bandwidth, at contexts of 32k
# FlashAttention-3 (Shah et al., 2024): about 620 TFLOP/s causal on an H100, head_dim 128, 16k tokens; 77 % of it.
PREFILL_GOAL_FLOPS = 477e12
_LONG_CONTEXT, _LONG_PROMPT = 32768, 16384


def attention_cases(
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    decodes: tuple[tuple[int, int], ...],
    chunks: tuple[tuple[int, int], ...],
    block_size: int,
) -> Iterator[Case]:
    """`decodes`: (sequences, context); `chunks`: (tokens before, tokens now)."""
    heads, rate = (shape.num_heads, shape.num_kv_heads, shape.head_dim), str(dtype).removeprefix("torch.")
    for count, context in decodes:
        batch = _Batch(shape, device, dtype, block_size, count, context - 1, 1)
        cost = decode_attention_cost([context] * count, heads, dtype.itemsize)
        size, goal = f"{count} x {context:,}", DECODE_GOAL if context >= _LONG_CONTEXT else 0.0
        yield Case("decode attention", size, cost, batch.decode, rate, goal)
        yield Case("decode attention, torch", size, cost, batch.torch_decode, rate)
    for before, now in chunks:
        batch = _Batch(shape, device, dtype, block_size, 1, before, now)
        cost = prefill_attention_cost([(before, now)], heads, dtype.itemsize)
        size = f"{now:,} on {before:,}" if before else f"{now:,}"
        goal_flops = PREFILL_GOAL_FLOPS if now >= _LONG_PROMPT and shape.head_dim == 128 else 0.0
        yield Case("prefill attention", size, cost, batch.prefill, rate, goal_flops=goal_flops)
        if not before:  # with a prefix torch needs a mask, for which it has no fast kernel
            yield Case("prefill attention, torch", size, cost, batch.torch_prefill, rate)


@dataclass(frozen=True, slots=True)
class _Batch:
    """`count` sequences of `before` cached and `now` new tokens each."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    block_size: int
    count: int
    before: int
    now: int

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def _cache(self) -> tuple[Tensor, Tensor, Tensor]:
        """The cache of one layer, block tables and context lengths."""
        length, shape = self.before + self.now, self.shape
        each = -(-length // self.block_size)
        kv = self._random(self.count * each, 2, shape.num_kv_heads, self.block_size, shape.head_dim)
        tables = torch.randperm(len(kv), device=self.device).to(torch.int32).view(self.count, each)
        return kv, tables, torch.full((self.count,), length, dtype=torch.int32, device=self.device)

    def decode(self) -> Run:
        shape = self.shape
        query, cache = self._random(self.count, shape.num_heads, shape.head_dim), self._cache()
        tokens = self.count * (self.before + self.now)
        workspace = DecodeWorkspace.allocate(self.count, tokens, shape.num_heads, shape.head_dim, self.device)
        return partial(decode_attention, query, *cache, workspace, scale=shape.head_dim**-0.5)

    def prefill(self) -> Run:
        shape = self.shape
        query, (kv, tables, lengths) = self._random(self.now, shape.num_heads, shape.head_dim), self._cache()
        starts = torch.tensor([0, self.now], dtype=torch.int32, device=self.device)
        return partial(prefill_attention, query, kv, tables, starts, lengths, self.now, scale=shape.head_dim**-0.5)

    def _contiguous(self) -> tuple[Tensor, Tensor, Tensor]:
        shape, length = self.shape, self.before + self.now
        query = self._random(self.count, shape.num_heads, self.now, shape.head_dim)
        key, value = (self._random(self.count, shape.num_kv_heads, length, shape.head_dim) for _ in range(2))
        return query, key, value

    def torch_decode(self) -> Run:
        return partial(F.scaled_dot_product_attention, *self._contiguous(), enable_gqa=True)

    def torch_prefill(self) -> Run:
        return partial(F.scaled_dot_product_attention, *self._contiguous(), is_causal=True, enable_gqa=True)
