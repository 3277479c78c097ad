"""The parts a decoder-only transformer is made of. Plain objects over tensors: inference needs no modules.

N is the number of tokens in the batch, packed without padding; H and KVH are query and key/value heads, D head_dim.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import AttentionPlan, KernelSet, Linear, QKNorm, Rope
from ..vocab.model_config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What every layer of one forward pass shares."""

    kernels: KernelSet
    rope: Rope
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

    def __call__(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the paged cache (Ainslie et al., 2023), rotary positions, optional q/k norm."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear  # hidden_size |-> (H + 2 * KVH) * D: all queries, keys, values
    out: Linear  # H * D |-> hidden_size
    qk_norm: QKNorm | None

    def __call__(self, x: Tensor, kv_layer: Tensor, context: ForwardContext, rows: Tensor | None) -> Tensor:
        """`[N, hidden_size]` |-> the same, only `rows` of it if given; the new keys and values go into the cache."""
        kernels = context.kernels
        heads = self.qkv(x).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        kernels.norm_rope_store(heads, self.num_heads, self.qk_norm, context.rope, kv_layer, context.plan)
        attended = kernels.attention(heads, self.num_heads, kv_layer, context.plan)
        return self.out(attended if rows is None else attended[rows])


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """SwiGLU (Shazeer, 2020)."""

    gate_up: Linear  # hidden_size |-> 2 * intermediate_size, gate first
    down: Linear  # intermediate_size |-> hidden_size

    def __call__(self, x: Tensor, kernels: KernelSet) -> Tensor:
        return self.down(kernels.silu_and_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

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
        x = self.mlp_norm.after_adding(attended, residual, kernels)
        return self.mlp(x, kernels), residual


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Of the rotary embedding (Su et al., 2021), one per pair of dimensions: `[D / 2]` float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    return _scale_frequencies(1.0 / config.rope_theta**exponents, config.rope_scaling)


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
