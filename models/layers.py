"""The parts a decoder-only transformer is made of. Plain objects over tensors: inference needs no modules.

N is the number of tokens in the batch, packed without padding; H and KVH are query and key/value heads, D head_dim.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import (
    AttentionPlan,
    Linear,
    apply_rope,
    paged_attention,
    rms_norm,
    silu_and_mul,
    store_kv,
)
from ..vocab.model_config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What every layer of one forward pass shares."""

    cos: Tensor  # [N, 1, D / 2]
    sin: Tensor  # [N, 1, D / 2]
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: Tensor  # [size]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token vectors, left in the dtype of the file so that they stay memory-mapped."""

    weight: Tensor  # [vocab_size, hidden_size]

    def __call__(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight).float()


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the paged cache (Ainslie et al., 2023), rotary positions, optional q/k norm."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear  # hidden_size |-> (H + 2 * KVH) * D: all queries, keys, values
    out: Linear  # H * D |-> hidden_size
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __call__(self, x: Tensor, kv_layer: Tensor, context: ForwardContext, rows: Tensor | None) -> Tensor:
        """`[N, hidden_size]` |-> the same, only `rows` of it if given; the new keys and values go into the cache."""
        heads = self.qkv(x).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query, key = heads[:, : self.num_heads], heads[:, self.num_heads : -self.num_kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            query.copy_(self.q_norm(query))
            key.copy_(self.k_norm(key))
        apply_rope(heads[:, : -self.num_kv_heads], context.cos, context.sin)
        key_value = heads[:, self.num_heads :].view(-1, 2, self.num_kv_heads, self.head_dim)
        store_kv(kv_layer, key_value, context.plan)
        attended = paged_attention(query, key_value, kv_layer, context.plan)
        return self.out(attended if rows is None else attended[rows])


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """SwiGLU (Shazeer, 2020)."""

    gate_up: Linear  # hidden_size |-> 2 * intermediate_size, gate first
    down: Linear  # intermediate_size |-> hidden_size

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_and_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, x: Tensor, kv_layer: Tensor, context: ForwardContext, rows: Tensor | None) -> Tensor:
        """Pre-norm residual block on `x` `[N, hidden_size]`, which is overwritten."""
        attended = self.attention(self.attention_norm(x), kv_layer, context, rows)
        x = x.add_(attended) if rows is None else x[rows].add_(attended)
        return x.add_(self.mlp(self.mlp_norm(x)))


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """Angles of the rotary embedding (Su et al., 2021): position times one frequency per pair of dimensions."""

    inverse_frequencies: Tensor  # [D / 2]

    @classmethod
    def from_config(cls, config: ModelConfig) -> "RotaryEmbedding":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        frequencies = 1.0 / config.rope_theta**exponents
        return cls(_scale_frequencies(frequencies, config.rope_scaling))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each `[N, 1, D / 2]`, of `positions` `[N]`."""
        angles = (positions.float().unsqueeze(1) * self.inverse_frequencies).unsqueeze(1)
        return angles.cos(), angles.sin()


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Stretch the frequencies for contexts longer than the training's; see RopeScaling."""
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    # Llama 3.1: turns of the pair within the original context decide between the two, linearly in between.
    turns = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)
