"""CpuKernels: the kernel set called "torch"."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from ..kernel_set import AttentionRule, Experts, Linear, QKNorm, Rope, RopeAngles, rope_angles
from .attention import AttentionPlan, paged_attention, store_kv
from .elementwise import apply_rope, gelu_and_mul, rms_norm, silu_and_mul
from .experts import pack_experts
from .linear import pack_linear


class CpuKernels:
    """fp32 activations throughout; see KernelSet for the ops. Plans are made by `plan_attention`."""

    activation_dtype = torch.float32

    def pack_linear(self, weight: Tensor, bias: Tensor | None, dtype: str) -> Linear:
        return pack_linear(weight, bias, dtype)

    def pack_head(self, weight: Tensor, dtype: str) -> Linear:
        return pack_linear(weight, None, dtype)

    def pack_experts(
        self, weights: Iterable[tuple[Tensor, Tensor]], num_experts: int, top_k: int, *, renormalize: bool, dtype: str
    ) -> Experts:
        return pack_experts(weights, top_k, renormalize=renormalize, dtype=dtype)

    def pack_rope(self, inverse_frequencies: Tensor, max_positions: int, scale: float) -> RopeAngles:
        return partial(rope_angles, inverse_frequencies, scale=scale)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(residual.add_(x), weight, eps)

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
        plan: AttentionPlan,
    ) -> None:
        num_kv_heads = kv_layer.shape[2]
        if qk_norm is not None:
            query, key = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads]
            query.copy_(rms_norm(query, qk_norm.q_weight, qk_norm.eps))
            key.copy_(rms_norm(key, qk_norm.k_weight, qk_norm.eps))
        apply_rope(heads[:, :-num_kv_heads], rope.cos.unsqueeze(1), rope.sin.unsqueeze(1))
        store_kv(kv_layer, _key_value(heads, num_heads), plan)

    def attention(
        self, heads: Tensor, num_heads: int, kv_layer: Tensor, plan: AttentionPlan, rule: AttentionRule
    ) -> Tensor:
        return paged_attention(heads[:, :num_heads], _key_value(heads, num_heads), kv_layer, plan, rule)


def _key_value(heads: Tensor, num_heads: int) -> Tensor:
    """The keys and values of fused heads, `[N, 2, KVH, D]`."""
    return heads[:, num_heads:].view(len(heads), 2, -1, heads.shape[2])
