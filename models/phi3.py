"""Phi-3: projections that are stored fused, and heads of which only a part may be rotated."""

from torch import Tensor

from ..kernels import Linear
from .llama import LlamaBuilder
from .rope import whole_rotation_order


class Phi3Builder(LlamaBuilder):
    __slots__ = ()

    def qkv(self, name: str) -> Linear:
        config = self.config
        num_heads = config.num_heads + 2 * config.num_kv_heads
        weight = self.weights.take(f"{name}.qkv_proj.weight", num_heads * config.head_dim, config.hidden_size)
        if config.partial_rotary_factor < 1:
            weight = self._reordered(weight.view(num_heads, config.head_dim, config.hidden_size))
        return self.kernels.pack_linear(weight, None, self.dtype)

    def gate_up(self, name: str) -> Linear:
        return self.linear(f"{name}.gate_up_proj", 2 * self.config.intermediate_size, self.config.hidden_size)

    def _reordered(self, heads: Tensor) -> Tensor:
        """`[H + 2 * KVH, D, hidden_size]` |-> `[(H + 2 * KVH) * D, hidden_size]`, queries and keys reordered."""
        config = self.config
        order = whole_rotation_order(config.head_dim, int(config.head_dim * config.partial_rotary_factor))
        heads = heads.clone()
        rotated = config.num_heads + config.num_kv_heads
        heads[:rotated] = heads[:rotated, order.to(heads.device)]
        return heads.flatten(0, 1)
