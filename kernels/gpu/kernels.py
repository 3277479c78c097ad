"""TritonKernels: the kernel set called "triton"."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernel_set import AttentionRule, Experts, Linear, QKNorm, Rope, RopeAngles, rope_angles
from .activation import gelu_and_mul, silu_and_mul
from .attention_common import MAX_SEQUENCES
from .decode_attention import DecodeWorkspace, decode_attention
from .gemm import linear
from .grouped_gemm import moe_forward
from .int8_gemm import int8_linear, quantize_int8
from .norm import add_rms_norm, rms_norm
from .prefill_attention import prefill_attention
from .rope_store import norm_rope_store


@dataclass(frozen=True, slots=True)
class DecodeSequences:
    """One token each. Tables are padded to the longest; what is behind a context's last block is never read."""

    block_tables: Tensor  # [D, max_blocks] int32
    context_lens: Tensor  # [D] int32; 0: padding
    workspace: DecodeWorkspace


@dataclass(frozen=True, slots=True)
class ChunkSequences:
    """Pieces of prompts."""

    block_tables: Tensor  # [P, max_blocks] int32
    context_lens: Tensor  # [P] int32
    cu_seqlens: Tensor  # [P + 1] int32, from 0
    max_len: int  # tokens of the longest chunk


@dataclass(frozen=True, slots=True)
class GpuAttentionPlan:
    """Where the tokens of one batch lie, in tensors on the device: the decodes first, then the chunks."""

    slot_mapping: Tensor  # [N] int64; below 0: padding, for which nothing is stored
    decodes: DecodeSequences | None
    chunks: ChunkSequences | None


class TritonKernels:
    """Activations of one dtype, sums in fp32; see KernelSet for the ops.

    `deterministic`: matrix products are our own, whose rows do not depend on their number, as all other ops are in any
    case. Otherwise they are torch's (cuBLAS), and only the int8 ones ours.
    """

    def __init__(self, activation_dtype: torch.dtype, *, deterministic: bool):
        self.activation_dtype = activation_dtype
        self._deterministic = deterministic

    def pack_linear(self, weight: Tensor, bias: Tensor | None, dtype: str) -> Linear:
        if dtype == "int8":
            values, scale = quantize_int8(weight)
            return partial(int8_linear, weight_int8=values, scale=scale, bias=bias)
        weight = weight.to(self.activation_dtype).contiguous()
        bias = None if bias is None else bias.to(self.activation_dtype)
        return partial(linear if self._deterministic else F.linear, weight=weight, bias=bias)

    def pack_head(self, weight: Tensor, dtype: str) -> Linear:
        """Logits are rounded once, to float32. The head is not quantised: it decides between near tokens."""
        weight = weight.to(self.activation_dtype).contiguous()
        if self._deterministic:
            return partial(linear, weight=weight, out_dtype=torch.float32)
        if self.activation_dtype == torch.float32 or weight.device.type == "cpu":
            return lambda x: F.linear(x, weight).float()
        return partial(_product_in_fp32, weight=weight)

    def pack_experts(
        self, weights: Iterable[tuple[Tensor, Tensor]], num_experts: int, top_k: int, *, renormalize: bool, dtype: str
    ) -> Experts:
        """Products are our own, deterministic or not. Experts are kept in the dtype of the activations."""
        stacked: tuple[Tensor, ...] = ()
        for index, pair in enumerate(weights):
            if not stacked:
                stacked = tuple(
                    part.new_empty((num_experts, *part.shape), dtype=self.activation_dtype) for part in pair
                )
            for whole, part in zip(stacked, pair, strict=True):
                whole[index] = part
        gate_up, down = stacked
        return partial(moe_forward, gate_up_weights=gate_up, down_weights=down, top_k=top_k, renormalize=renormalize)

    def pack_rope(self, inverse_frequencies: Tensor, max_positions: int, scale: float) -> RopeAngles:
        """Angles from a table: one launch, and a position's angles are the same bits wherever its token lies."""
        positions = torch.arange(max_positions, device=inverse_frequencies.device)
        table = torch.stack(rope_angles(inverse_frequencies, positions, scale), 1)  # [max_positions, 2, D / 2]
        return lambda positions: Rope(*table.index_select(0, positions).unbind(1))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        return gelu_and_mul(gate_up)

    def norm_rope_store(
        self,
        heads: Tensor,
        num_heads: int,
        qk_norm: QKNorm | None,
        rope: Rope,
        kv_layer: Tensor,
        plan: GpuAttentionPlan,
    ) -> None:
        q_weight, k_weight, eps = (None, None, 0.0) if qk_norm is None else qk_norm
        norm_rope_store(heads, num_heads, q_weight, k_weight, eps, *rope, kv_layer, plan.slot_mapping)

    def attention(
        self, heads: Tensor, num_heads: int, kv_layer: Tensor, plan: GpuAttentionPlan, rule: AttentionRule
    ) -> Tensor:
        num_tokens, _, head_dim = heads.shape
        query = heads[:, :num_heads]
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
        first = 0  # row of the first chunk
        if (one := plan.decodes) is not None:
            first = len(one.context_lens)
            decode_attention(
                query[:first],
                kv_layer,
                one.block_tables,
                one.context_lens,
                one.workspace,
                scale=rule.scale,
                window=rule.window,
                soft_cap=rule.soft_cap,
                out=out[:first],
            )
        if (many := plan.chunks) is not None:
            for start in range(0, len(many.context_lens), MAX_SEQUENCES):  # as many as one launch takes
                some = slice(start, start + MAX_SEQUENCES)
                prefill_attention(
                    query[first:],
                    kv_layer,
                    many.block_tables[some],
                    many.cu_seqlens[start : start + MAX_SEQUENCES + 1],
                    many.context_lens[some],
                    many.max_len,
                    scale=rule.scale,
                    window=rule.window,
                    soft_cap=rule.soft_cap,
                    out=out[first:],
                )
        return out.view(num_tokens, num_heads * head_dim)


def _product_in_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` of half-precision operands on a GPU, kept as cuBLAS sums it."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
