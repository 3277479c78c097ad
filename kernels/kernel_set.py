"""KernelSet: the ops that models are written in, whatever computes them.

N is the number of tokens of the batch, packed without padding; H and KVH are query and key/value heads, D head_dim.
`heads` is the fused projection `[N, H + 2 * KVH, D]`: queries, keys and values of a token side by side. `kv_layer` is
one layer's view of the cache, `[num_blocks, 2, KVH, block_size, D]`.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]  # [n, in_features] |-> [n, out_features]

# A mixture of experts behind its router: [n, hidden_size] and router logits [n, num_experts] |-> [n, hidden_size]
Experts = Callable[[Tensor, Tensor], Tensor]

# Where the tokens of one batch lie, as one kernel set needs it: made by that set, the same for every layer.
AttentionPlan = Any


class Rope(NamedTuple):
    """Angles of the rotary embedding, float32, one row per token of the batch."""

    cos: Tensor  # [N, D / 2]
    sin: Tensor  # [N, D / 2]


RopeAngles = Callable[[Tensor], Rope]  # of positions [N]


def rope_angles(inverse_frequencies: Tensor, positions: Tensor, scale: float = 1.0) -> Rope:
    """Position times one frequency per pair of dimensions, `[D / 2]` (Su et al., 2021).

    `scale` lengthens what is rotated: YaRN's and LongRoPE's attention factor.
    """
    angles = positions.float().unsqueeze(1) * inverse_frequencies
    return Rope(angles.cos() * scale, angles.sin() * scale)


class QKNorm(NamedTuple):
    """An RMSNorm over head_dim that queries and keys pass before the rotation (Qwen3)."""

    q_weight: Tensor  # [D]
    k_weight: Tensor  # [D]
    eps: float


class AttentionRule(NamedTuple):
    """How a layer's tokens see each other, beside causally; see `reference.paged_attention`."""

    scale: float  # of the scores
    window: int = 0  # > 0: a token sees itself and the `window - 1` tokens before it
    soft_cap: float = 0.0  # > 0: a score x becomes `soft_cap * tanh(x / soft_cap)`


class KernelSet(Protocol):
    """Activations are `activation_dtype` between the ops; weights are packed once, when the model is built."""

    @property
    def activation_dtype(self) -> torch.dtype: ...

    def pack_linear(self, weight: Tensor, bias: Tensor | None, dtype: str) -> Linear:
        """Make `x @ weight.T + bias` ready to run; `weight` `[out_features, in_features]`, kept as `dtype`."""

    def pack_head(self, weight: Tensor, dtype: str) -> Linear:
        """The same for the matrix `[vocab_size, hidden_size]` that makes logits, which are float32."""

    def pack_experts(
        self, weights: Iterable[tuple[Tensor, Tensor]], num_experts: int, top_k: int, *, renormalize: bool, dtype: str
    ) -> Experts:
        """`reference.moe_forward` of these weights: of each expert `[2 * I, hidden]`, gate first, and `[hidden, I]`."""

    def pack_rope(self, inverse_frequencies: Tensor, max_positions: int, scale: float) -> RopeAngles:
        """`rope_angles` of these frequencies `[D / 2]`, for positions below `max_positions`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`[N, size]` |-> its RMSNorm over the last dimension."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place; returns the RMSNorm of the sum."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `[N, 2 * size]`, gate first."""

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`gelu(gate) * up`, with gelu's approximation by tanh."""

    def norm_rope_store(
        self,
        heads: Tensor,
        num_heads: int,
        qk_norm: QKNorm | None,
        rope: Rope,
        kv_layer: Tensor,
        plan: AttentionPlan,
    ) -> None:
        """Normalise and rotate queries and keys, and write keys and values into the slots of the plan.

        The queries are changed in place; what is left in the keys' and values' place is for `attention` alone.
        """

    def attention(
        self, heads: Tensor, num_heads: int, kv_layer: Tensor, plan: AttentionPlan, rule: AttentionRule
    ) -> Tensor:
        """Causal attention of each token over its own sequence, after `norm_rope_store`; returns `[N, H * D]`."""
