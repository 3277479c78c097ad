"""Mixtral: Mistral with experts in all layers."""

from .layers import SparseMLP
from .llama import LlamaBuilder


class MixtralBuilder(LlamaBuilder):
    __slots__ = ()

    def mlp(self, name: str, index: int) -> SparseMLP:
        moe = f"{name}.block_sparse_moe"
        return self.sparse_mlp(f"{moe}.gate", f"{moe}.experts", ("w1", "w3", "w2"))
