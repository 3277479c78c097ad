"""Qwen3-MoE: Qwen3 with experts in some layers or in all."""

from .layers import GatedMLP, SparseMLP
from .llama import LlamaBuilder


class Qwen3MoeBuilder(LlamaBuilder):
    __slots__ = ()

    def mlp(self, name: str, index: int) -> GatedMLP | SparseMLP:
        assert self.config.experts is not None
        if index not in self.config.experts.layers:
            return LlamaBuilder.mlp(self, name, index)
        return self.sparse_mlp(f"{name}.mlp.gate", f"{name}.mlp.experts", ("gate_proj", "up_proj", "down_proj"))
