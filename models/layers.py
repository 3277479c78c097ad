"""The parts a decoder-only transformer is made of. Plain objects over tensors: inference needs no modules.

N is the number of tokens in the batch, packed without padding; H and KVH are query and key/value heads, D head_dim.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import AttentionPlan, AttentionRule, Experts, KernelSet, Linear, QKNorm, Rope


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What every layer of one forward pass shares."""

    kernels: KernelSet
    ropes: tuple[Rope, ...]  # of each base that the model has
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: Tensor  # [size] float32
    eps: float

    def __call__(self, x: Tensor, kernels: KernelSet) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: Tensor, residual: Tensor, kernels: KernelSet) -> Tensor:
        """`residual += x` in place; returns the norm of the sum."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token vectors. On the CPU they are left in the dtype of the file, so that they stay memory-mapped."""

    weight: Tensor  # [vocab_size, hidden_size]
    dtype: torch.dtype  # of the activations
    scale: float = 1.0

    def __call__(self, input_ids: Tensor) -> Tensor:
        vectors = F.embedding(input_ids, self.weight).to(self.dtype)
        return vectors if self.scale == 1 else vectors * self.scale


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the paged cache (Ainslie et al., 2023), rotary positions, optional q/k norm."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear  # hidden_size |-> (H + 2 * KVH) * D: all queries, keys, values
    out: Linear  # H * D |-> hidden_size
    qk_norm: QKNorm | None
    rule: AttentionRule
    rope: int = 0  # index among the context's

    def __call__(self, x: Tensor, kv_layer: Tensor, context: ForwardContext, rows: Tensor | None) -> Tensor:
        """`[N, hidden_size]` |-> the same, only `rows` of it if given; the new keys and values go into the cache."""
        kernels = context.kernels
        heads = self.qkv(x).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        rope = context.ropes[self.rope]
        kernels.norm_rope_store(heads, self.num_heads, self.qk_norm, rope, kv_layer, context.plan)
        attended = kernels.attention(heads, self.num_heads, kv_layer, context.plan, self.rule)
        return self.out(attended if rows is None else attended[rows])


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """SwiGLU, or GeGLU (Shazeer, 2020)."""

    gate_up: Linear  # hidden_size |-> 2 * intermediate_size, gate first
    down: Linear  # intermediate_size |-> hidden_size
    is_gelu: bool = False

    def __call__(self, x: Tensor, kernels: KernelSet) -> Tensor:
        gate_up = self.gate_up(x)
        return self.down(kernels.gelu_and_mul(gate_up) if self.is_gelu else kernels.silu_and_mul(gate_up))


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """A mixture of experts: a router sends each token to a few SwiGLUs (Shazeer et al., 2017)."""

    router: Linear  # hidden_size |-> num_experts, float32
    experts: Experts

    def __call__(self, x: Tensor, kernels: KernelSet) -> Tensor:
        return self.experts(x, self.router(x))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The post-norms, if there are any, stand behind attention and the MLP, before the residual stream (Gemma)."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP | SparseMLP
    post_attention_norm: RMSNorm | None = None
    post_mlp_norm: RMSNorm | None = None

    def __call__(
        self, update: Tensor | None, residual: Tensor, kv_layer: Tensor, context: ForwardContext, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Pre-norm residual block. `update` is what the layer before adds to the residual stream `[N, hidden_size]`.

        It is left to the next norm to add it, since both read the sum. Returns the two for the next layer, only `rows`
        of them if given; `residual` is overwritten.
        """
        kernels = context.kernels
        if update is None:
            x = self.attention_norm(residual, kernels)
        else:
            x = self.attention_norm.after_adding(update, residual, kernels)
        attended = self.attention(x, kv_layer, context, rows)
        residual = residual if rows is None else residual[rows]
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended, kernels)
        x = self.mlp(self.mlp_norm.after_adding(attended, residual, kernels), kernels)
        return x if self.post_mlp_norm is None else self.post_mlp_norm(x, kernels), residual
