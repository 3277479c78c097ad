"""The Triton kernels at the sizes of one model, with cuBLAS and torch's attention beside them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.gpu.activation import activation_cost, silu_and_mul
from ...kernels.gpu.block_copy import copy_cost, gather_tokens, scatter_tokens
from ...kernels.gpu.checksum import checksum, checksum_cost
from ...kernels.gpu.feedback import feedback_cost, resolve_feedback
from ...kernels.gpu.gemm import linear, linear_cost, linear_shapes
from ...kernels.gpu.grouped_gemm import moe_cost, moe_forward
from ...kernels.gpu.int8_gemm import int8_linear, int8_linear_cost, quantize_int8
from ...kernels.gpu.logprobs import logprobs_cost, token_logprobs
from ...kernels.gpu.model_shapes import ModelShape
from ...kernels.gpu.norm import add_rms_norm, norm_cost, rms_norm
from ...kernels.gpu.penalties import add_bias, apply_penalties, bias_cost, keep_allowed, mask_cost, penalties_cost
from ...kernels.gpu.rope_store import norm_rope_store, rope_store_cost
from ...kernels.gpu.sampling import SamplingTensors, sample, sampling_cost
from .case import Case, Run
from .gpu_attention_cases import attention_cases

NORM_GOAL = 0.88  # of the limit, for many rows


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """How large the cases are."""

    rows: tuple[int, ...] = (1, 64, 256, 8192)  # of products, norms and what lies between them
    sampled_rows: tuple[int, ...] = (1, 64, 256)
    decodes: tuple[tuple[int, int], ...] = ((1, 1024), (64, 1024), (256, 1024), (1, 32768), (8, 32768))
    chunks: tuple[tuple[int, int], ...] = ((0, 1024), (0, 8192), (0, 16384), (8192, 1024))  # before, now
    piece_tokens: int = 512
    checksum_bytes: int = 64 * 1024**2
    penalised_tokens: int = 1024  # of each row
    block_size: int = 16


def gpu_cases(
    shape: ModelShape, device: torch.device, dtype: torch.dtype = torch.bfloat16, sizes: GpuSizes | None = None
) -> Iterator[Case]:
    """Every op of the model: attention first, then what is bound by memory, then products, then sampling."""
    on = _Operands(shape, device, dtype, sizes or GpuSizes())
    yield from attention_cases(shape, device, dtype, on.sizes.decodes, on.sizes.chunks, on.sizes.block_size)
    yield from on.elementwise()
    yield from on.copies()
    yield from on.products()
    if shape.num_experts:
        yield from on.experts()
    yield from on.around_sampling()
    yield from on.sampling()


@dataclass(frozen=True, slots=True)
class _Operands:
    """The cases that are not attention, and what allocates their operands."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    sizes: GpuSizes

    @property
    def _rate(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def _random(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(size, device=self.device, dtype=dtype or self.dtype)

    def elementwise(self) -> Iterator[Case]:
        shape, item = self.shape, self.dtype.itemsize
        hidden, size = shape.hidden_size, shape.expert_intermediate_size or shape.intermediate_size
        name = "qk-norm, rope, store" if shape.qk_norm else "rope, store"
        for rows in self.sizes.rows:
            goal = NORM_GOAL if rows >= 4096 else 0.0
            norm, add = norm_cost(rows, hidden, item, False), norm_cost(rows, hidden, item, True)
            store = rope_store_cost(rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, item)
            silu = partial(self._silu, rows, size)
            yield Case("rms norm", rows_text(rows), norm, partial(self._norm, rows), self._rate, goal)
            yield Case("add, rms norm", rows_text(rows), add, partial(self._add_norm, rows), self._rate, goal)
            yield Case("silu and mul", rows_text(rows), activation_cost(rows, size, item), silu, self._rate)
            yield Case(name, rows_text(rows), store, partial(self._store, rows), self._rate)

    def _norm(self, rows: int) -> Run:
        x, weight = self._random(rows, self.shape.hidden_size), self._random(self.shape.hidden_size)
        return partial(rms_norm, x, weight, 1e-5, out=torch.empty_like(x))

    def _add_norm(self, rows: int) -> Run:
        x, weight = self._random(rows, self.shape.hidden_size), self._random(self.shape.hidden_size)
        return partial(add_rms_norm, torch.zeros_like(x), x, weight, 1e-5, out=torch.empty_like(x))

    def _silu(self, rows: int, size: int) -> Run:
        return partial(silu_and_mul, self._random(rows, 2 * size), out=self._random(rows, size))

    def _store(self, rows: int) -> Run:
        shape, block_size = self.shape, self.sizes.block_size
        heads = self._random(rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        num_blocks = -(-rows // block_size)
        kv = self._random(num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
        slots = torch.randperm(num_blocks * block_size, device=self.device)[:rows]
        weight = torch.ones(shape.head_dim, device=self.device) if shape.qk_norm else None
        cos, sin = torch.rand(2, rows, shape.head_dim // 2, device=self.device)
        return partial(norm_rope_store, heads, shape.num_heads, weight, weight, 1e-5, cos, sin, kv, slots)

    def copies(self) -> Iterator[Case]:
        shape, tokens, item = self.shape, self.sizes.piece_tokens, self.dtype.itemsize
        cost = copy_cost(tokens, shape.num_layers, shape.num_kv_heads, shape.head_dim, item)
        for name, op in (("gather", gather_tokens), ("scatter", scatter_tokens)):
            yield Case(name, f"{tokens} tokens", cost, partial(self._copy, op), self._rate)
        size = self.sizes.checksum_bytes

        def check() -> Run:
            return partial(checksum, torch.randint(256, (size,), dtype=torch.uint8, device=self.device))

        yield Case("checksum", f"{size / 1024**2:g} MiB", checksum_cost(size), check, self._rate)

    def _copy(self, op: Callable[..., None]) -> Run:
        shape, block_size, tokens = self.shape, self.sizes.block_size, self.sizes.piece_tokens
        num_blocks = -(-tokens // block_size)
        blocks = self._random(num_blocks, shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
        table = torch.randperm(num_blocks, device=self.device)
        size = blocks[0].nbytes // block_size * tokens
        piece = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return partial(op, blocks, table, 0, tokens, 0, shape.num_layers, piece)

    def products(self) -> Iterator[Case]:
        item = self.dtype.itemsize
        for name, (in_features, out_features) in linear_shapes(self.shape).items():
            for rows in self.sizes.sampled_rows if name == "lm_head" else self.sizes.rows:
                cost = linear_cost(rows, in_features, out_features, item)
                args = (in_features, out_features, rows)
                yield Case(f"linear {name}, own", rows_text(rows), cost, partial(self._linear, *args), self._rate)
                yield Case(f"linear {name}, cuBLAS", rows_text(rows), cost, partial(self._torch, *args), self._rate)
                if name not in ("lm_head", "router"):
                    cost = int8_linear_cost(rows, in_features, out_features, item)
                    yield Case(f"linear {name}, int8", rows_text(rows), cost, partial(self._int8, *args), self._rate)

    def _weight(self, in_features: int, out_features: int) -> Tensor:
        return self._random(out_features, in_features).mul_(in_features**-0.5)

    def _linear(self, in_features: int, out_features: int, rows: int) -> Run:
        return partial(linear, self._random(rows, in_features), self._weight(in_features, out_features))

    def _torch(self, in_features: int, out_features: int, rows: int) -> Run:
        return partial(F.linear, self._random(rows, in_features), self._weight(in_features, out_features))

    def _int8(self, in_features: int, out_features: int, rows: int) -> Run:
        values, scale = quantize_int8(self._weight(in_features, out_features))
        return partial(int8_linear, self._random(rows, in_features), values, scale)

    def experts(self) -> Iterator[Case]:
        for rows in self.sizes.rows:
            cost = moe_cost(rows, self.shape, self.dtype.itemsize)
            yield Case("experts, whole layer", rows_text(rows), cost, partial(self._experts, rows), self._rate)

    def _experts(self, rows: int) -> Run:
        shape = self.shape
        hidden, size, count = shape.hidden_size, shape.expert_intermediate_size, shape.num_experts
        gate_up = self._random(count, 2 * size, hidden).mul_(hidden**-0.5)
        down = self._random(count, hidden, size).mul_(size**-0.5)
        x, logits = self._random(rows, hidden), self._random(rows, count)
        return partial(moe_forward, x, logits, gate_up, down, shape.experts_per_token, True)

    def around_sampling(self) -> Iterator[Case]:
        """What changes logits before a token is drawn, and what brings the token to the next step."""
        tokens = self.sizes.penalised_tokens
        for rows in self.sizes.sampled_rows:
            penalise, text = partial(self._penalise, rows, tokens), rows_text(rows)
            yield Case("penalties", f"{text} x {tokens:,}", penalties_cost(rows * tokens), penalise, "float32")
            yield Case("logit bias", text, bias_cost(rows), partial(self._bias, rows), "float32")
            mask, logprobs = mask_cost(rows, self.shape.vocab_size), logprobs_cost(rows, self.shape.vocab_size, 5)
            yield Case("token mask", text, mask, partial(self._mask, rows), "float32")
            yield Case("log-probabilities, top 5", text, logprobs, partial(self._score, rows), "float32")
            yield Case("token feedback", text, feedback_cost(rows), partial(self._feed_back, rows), "float32")

    def _penalise(self, rows: int, tokens: int) -> Run:
        vocab_size = self.shape.vocab_size
        logits = self._random(rows, vocab_size, dtype=torch.float32)
        of_rows = torch.arange(rows, device=self.device).repeat_interleave(tokens)
        ids = torch.arange(tokens, device=self.device).mul_(vocab_size // tokens).repeat(rows)
        weak = torch.full((rows,), 0.1, dtype=torch.float64, device=self.device)
        return partial(apply_penalties, logits, of_rows, ids, torch.ones_like(ids), 1 + weak, weak, weak)

    def _bias(self, rows: int) -> Run:
        logits = self._random(rows, self.shape.vocab_size, dtype=torch.float32)
        whole = torch.arange(rows, device=self.device)
        return partial(add_bias, logits, whole, whole, torch.ones(rows, dtype=torch.float64, device=self.device))

    def _mask(self, rows: int) -> Run:
        logits = self._random(rows, self.shape.vocab_size, dtype=torch.float32)
        words = torch.zeros((rows, -(-self.shape.vocab_size // 32)), dtype=torch.int32, device=self.device)
        return partial(keep_allowed, logits, torch.arange(rows, device=self.device), words)

    def _score(self, rows: int) -> Run:
        logits = self._random(rows, self.shape.vocab_size, dtype=torch.float32)
        whole = torch.arange(rows, device=self.device)
        return partial(token_logprobs, logits, whole, whole, 5)

    def _feed_back(self, rows: int) -> Run:
        slots = torch.randperm(rows, device=self.device)
        return partial(resolve_feedback, torch.zeros_like(slots), slots, torch.arange(rows, device=self.device))

    def sampling(self) -> Iterator[Case]:
        kinds = {"greedy": (0.0, 0, 1.0), "T 0.7": (0.7, 0, 1.0), "top-p 0.9": (0.7, 0, 0.9)}
        for name, (temperature, top_k, top_p) in kinds.items():
            for rows in self.sizes.sampled_rows:
                cost = sampling_cost(rows, self.shape.vocab_size, drawn=temperature > 0)
                make = partial(self._sample, rows, temperature, top_k, top_p)
                yield Case("sampling", f"{rows_text(rows)}, {name}", cost, make, "float32")

    def _sample(self, rows: int, temperature: float, top_k: int, top_p: float) -> Run:
        logits = 4 * self._random(rows, self.shape.vocab_size, dtype=torch.float32)
        floats = [torch.full((rows,), v, dtype=torch.float64, device=self.device) for v in (temperature, top_p, 0.0)]
        whole = torch.arange(rows, device=self.device)
        params = SamplingTensors(
            temperature=floats[0],
            top_k=torch.full_like(whole, top_k),
            top_p=floats[1],
            min_p=floats[2],
            seed_low=whole,
            seed_high=whole,
            choice=torch.zeros_like(whole),
            position=whole,
            any_drawn=temperature > 0,
            any_filtered=top_k > 0 or top_p < 1,
        )
        return partial(sample, logits, params)


def rows_text(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
