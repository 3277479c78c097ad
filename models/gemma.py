"""Gemma 2 and 3: embeddings scaled by the root of their size, norms that multiply by 1 + w, and norms behind too.

What their configs say besides: GeGLU, windows on some layers, and soft caps (Gemma 2) or norms of queries and keys and
a second rotary base (Gemma 3).
"""

import math

from torch import Tensor

from .layers import DecoderLayer
from .llama import LlamaBuilder


class GemmaBuilder(LlamaBuilder):
    __slots__ = ()

    def embedding_scale(self) -> float:
        return math.sqrt(self.config.hidden_size)

    def layer(self, name: str, index: int) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=self.norm(f"{name}.input_layernorm"),
            attention=self.attention(f"{name}.self_attn", index),
            post_attention_norm=self.norm(f"{name}.post_attention_layernorm"),
            mlp_norm=self.norm(f"{name}.pre_feedforward_layernorm"),
            mlp=self.mlp(name, index),
            post_mlp_norm=self.norm(f"{name}.post_feedforward_layernorm"),
        )

    def norm_weight(self, name: str, size: int) -> Tensor:
        return 1 + LlamaBuilder.norm_weight(self, name, size)
