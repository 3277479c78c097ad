"""The ops of the CPU path at the sizes of one model: what `baton serve` computes with on this processor."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...core.layout import BlockLayout
from ...core.request import SamplingParams
from ...kernels import AttentionRule
from ...kernels.cpu import AttentionPlan, CpuKernels, plan_attention
from ...kernels.gpu.cost import OpCost
from ...kernels.gpu.model_shapes import ModelShape
from ...kernels.kernel_set import Rope
from ..feedback import make_feedback
from ..kv_cache_pool import KVCachePool
from ..sampler import HostSampler, SamplingRow
from .case import Case, Run

_BLOCK_SIZE = 16
_WEIGHT_BYTES = {"float16": 2, "float32": 4}
_ROWS = (1, 8, 256)  # one decode, a batch of them, a chunk of a prompt
_DECODES = ((1, 256), (8, 256), (1, 2048))  # sequences, context
_CHUNKS = ((0, 256), (768, 256))  # tokens before, tokens now


def cpu_cases(shape: ModelShape) -> Iterator[Case]:
    """All ops of a dense model. The CPU path runs no experts: of a mixture of them, what it shares with a dense one."""
    yield from _linear_cases(shape)
    yield from _attention_cases(shape)
    yield from _elementwise_cases(shape)
    yield from _copy_cases(shape)
    yield from _sampler_cases(shape)


def linear_shapes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """name |-> (in_features, out_features)."""
    width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "qkv": (shape.hidden_size, width + 2 * kv_width),
        "o": (width, shape.hidden_size),
        "gate_up": (shape.hidden_size, 2 * shape.intermediate_size),
        "down": (shape.intermediate_size, shape.hidden_size),
        "lm_head": (shape.hidden_size, shape.vocab_size),
    }


def _linear_cases(shape: ModelShape) -> Iterator[Case]:
    for dtype, item_size in _WEIGHT_BYTES.items():
        for name, (in_features, out_features) in linear_shapes(shape).items():
            for rows in _ROWS[:2] if name == "lm_head" else _ROWS:
                moved = item_size * in_features * out_features + 4 * rows * (in_features + out_features)
                cost = OpCost(moved, 2 * rows * in_features * out_features)
                make = partial(_linear, in_features, out_features, rows, dtype)
                yield Case(f"linear {name}, {_short(dtype)}", _rows(rows), cost, make, dtype)


def _linear(in_features: int, out_features: int, rows: int, dtype: str) -> Run:
    linear = CpuKernels().pack_linear(torch.randn(out_features, in_features), None, dtype)
    return partial(linear, torch.randn(rows, in_features))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences of equal length whose blocks are scattered over a cache of one layer."""

    shape: ModelShape
    num_sequences: int
    before: int  # tokens of each that are in the cache
    now: int  # tokens of each that are computed

    def operands(self) -> tuple[CpuKernels, Tensor, Tensor, AttentionPlan]:
        """The kernels, the heads of the new tokens, the cache and the plan."""
        shape, length = self.shape, self.before + self.now
        each = -(-length // _BLOCK_SIZE)
        kv = torch.randn(self.num_sequences * each, 2, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim)
        tables = torch.randperm(len(kv)).view(self.num_sequences, each)
        positions = torch.arange(self.before, length)
        slots = tables[:, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
        starts = [self.now * i for i in range(self.num_sequences + 1)]
        plan = plan_attention(kv, slots.view(-1), starts, [length] * self.num_sequences, list(tables))
        heads = torch.randn(starts[-1], shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        return CpuKernels(), heads, kv, plan

    def attend(self) -> Run:
        kernels, heads, kv, plan = self.operands()
        rule = AttentionRule(self.shape.head_dim**-0.5)
        return lambda: kernels.attention(heads, self.shape.num_heads, kv, plan, rule)

    def store(self) -> Run:
        kernels, heads, kv, plan = self.operands()
        rope = Rope(*torch.randn(2, len(heads), self.shape.head_dim // 2))
        return lambda: kernels.norm_rope_store(heads, self.shape.num_heads, None, rope, kv, plan)

    @property
    def attend_cost(self) -> OpCost:
        """Keys and values once, queries in, outputs out; visible scores only."""
        shape, count = self.shape, self.num_sequences
        moved = 2 * (self.before + self.now) * shape.num_kv_heads + 2 * self.now * shape.num_heads
        scores = self.now * self.before + self.now * (self.now + 1) // 2
        return OpCost(4 * count * moved * shape.head_dim, 4 * count * scores * shape.num_heads * shape.head_dim)


def _attention_cases(shape: ModelShape) -> Iterator[Case]:
    for count, context in _DECODES:
        batch = _Batch(shape, count, context - 1, 1)
        yield Case("decode attention", f"{count} x {context:,}", batch.attend_cost, batch.attend, "float32")
    for before, now in _CHUNKS:
        batch = _Batch(shape, 1, before, now)
        size = f"{now} on {before:,}" if before else f"{now}"
        yield Case("prefill attention", size, batch.attend_cost, batch.attend, "float32")


def _elementwise_cases(shape: ModelShape) -> Iterator[Case]:
    kernels, hidden, size = CpuKernels(), shape.hidden_size, shape.intermediate_size
    all_heads = shape.num_heads + 2 * shape.num_kv_heads
    weight = torch.ones(hidden)
    for rows in _ROWS:

        def norm(rows: int = rows) -> Run:
            return partial(kernels.rms_norm, torch.randn(rows, hidden), weight, 1e-5)

        def add_norm(rows: int = rows) -> Run:
            return partial(kernels.add_rms_norm, torch.zeros(rows, hidden), torch.randn(rows, hidden), weight, 1e-5)

        def silu(rows: int = rows) -> Run:
            return partial(kernels.silu_and_mul, torch.randn(rows, 2 * size))

        norm_cost = OpCost(4 * (2 * rows + 1) * hidden, 4 * rows * hidden)
        add_cost = OpCost(4 * (4 * rows + 1) * hidden, 5 * rows * hidden)
        elements = rows * all_heads * shape.head_dim
        yield Case("rms norm", _rows(rows), norm_cost, norm, "float32")
        yield Case("add, rms norm", _rows(rows), add_cost, add_norm, "float32")
        yield Case("silu and mul", _rows(rows), OpCost(12 * rows * size, 5 * rows * size), silu, "float32")
        store = _Batch(shape, 1, 0, rows).store
        yield Case("rope, store", _rows(rows), OpCost(8 * elements, 6 * elements), store, "float32")


def _copy_cases(shape: ModelShape, num_tokens: int = 256) -> Iterator[Case]:
    """Keys and values of some tokens of all layers, as a hand-over copies them."""
    layout = BlockLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, _BLOCK_SIZE, "float32")
    cost = OpCost(2 * num_tokens * layout.bytes_per_token, 0)

    def copy(*, is_gather: bool) -> Run:
        num_blocks = layout.num_blocks(num_tokens)
        pool, table = KVCachePool(layout, num_blocks), torch.randperm(num_blocks).tolist()
        piece = memoryview(bytearray(num_tokens * layout.bytes_per_token))
        pool.scatter(table, 0, num_tokens, piece)  # touches every page of the pool
        return partial(pool.gather if is_gather else pool.scatter, table, 0, num_tokens, piece)

    for name, is_gather in (("gather", True), ("scatter", False)):
        yield Case(name, f"{num_tokens} tokens", cost, partial(copy, is_gather=is_gather), "float32")


def _sampler_cases(shape: ModelShape) -> Iterator[Case]:
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "T 0.7": SamplingParams(temperature=0.7),
        "top-k 50": SamplingParams(temperature=0.7, top_k=50),
        "top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    }
    sampler = HostSampler(make_feedback(torch.device("cpu")))
    for name, params in kinds.items():
        for count in (1, 8):
            passes = 1 if params.greedy else 2
            cost = OpCost(4 * passes * count * shape.vocab_size, count * shape.vocab_size)

            def make(count: int = count, params: SamplingParams = params) -> Run:
                logits = 4 * torch.randn(count, shape.vocab_size)
                return partial(sampler.sample, logits, [SamplingRow(params, 0, position) for position in range(count)])

            yield Case("sampler", f"{_rows(count)}, {name}", cost, make, "float32")


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _short(dtype: str) -> str:
    return dtype.replace("float", "fp")
