"""The Llama shape: Llama, Mistral without a window, Qwen2 (q, k, v biases) and Qwen3 (norm of q and k)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import AttentionPlan, KernelSet, Linear, QKNorm, RopeAngles
from ..vocab.model_config import ModelConfig
from .layers import Attention, DecoderLayer, Embedding, ForwardContext, GatedMLP, RMSNorm, inverse_frequencies
from .weights import WeightReader

LayerHook = Callable[[int], None]  # is told how many layers have been launched


@dataclass(frozen=True, slots=True)
class LlamaModel:
    kernels: KernelSet
    embedding: Embedding
    rotary: RopeAngles
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    lm_head: Linear  # hidden_size |-> vocab_size

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        kv_layers: Sequence[Tensor],
        output_rows: Tensor | None,
        on_layer: LayerHook | None = None,
    ) -> Tensor:
        """Compute the batch's tokens and write their keys and values into the cache.

        `input_ids` and `positions` are `[N]`, `kv_layers` one cache view per layer. Returns the hidden states after the
        final norm of the tokens `output_rows` `[n]` (None: of all), as `[n, hidden_size]`. `on_layer(i)` is called when
        the first i layers have been launched.
        """
        context = ForwardContext(self.kernels, self.rotary(positions), plan)
        residual = self.embedding(input_ids)
        update: Tensor | None = None
        # Behind the last attention only the wanted tokens matter.
        last = None if output_rows is None or len(output_rows) == len(input_ids) else output_rows
        for index, (layer, kv_layer) in enumerate(zip(self.layers, kv_layers, strict=True), start=1):
            update, residual = layer(update, residual, kv_layer, context, last if index == len(self.layers) else None)
            if on_layer is not None:
                on_layer(index)
        assert update is not None
        return self.norm.after_adding(update, residual, self.kernels)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` after the final norm |-> `[n, vocab_size]` float32."""
        return self.lm_head(hidden)


def build_llama(config: ModelConfig, weights: WeightReader, kernels: KernelSet, dtype: str) -> LlamaModel:
    """Read and pack the weights under the names Hugging Face gives them."""
    embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    if weights.device.type != "cpu":
        embedding = embedding.to(kernels.activation_dtype)
    if config.tie_word_embeddings:
        weights.ignore("lm_head.weight")  # some files store the tied matrix twice
        head = embedding
    else:
        head = weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
    weights.ignore("rotary_emb.inv_freq")  # old files store the frequencies, which follow from the config
    return LlamaModel(
        kernels=kernels,
        embedding=Embedding(embedding, kernels.activation_dtype),
        rotary=kernels.pack_rope(inverse_frequencies(config).to(weights.device), config.max_position_embeddings),
        layers=tuple(_LayerBuilder(config, weights, kernels, dtype, i).layer() for i in range(config.num_layers)),
        norm=RMSNorm(weights.take("model.norm.weight", config.hidden_size).float(), config.rms_norm_eps),
        lm_head=kernels.pack_head(head, dtype),
    )


@dataclass(frozen=True, slots=True)
class _LayerBuilder:
    config: ModelConfig
    weights: WeightReader
    kernels: KernelSet
    dtype: str
    index: int

    def layer(self) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=self._norm("input_layernorm"),
            attention=self._attention(),
            mlp_norm=self._norm("post_attention_layernorm"),
            mlp=self._mlp(),
        )

    def _attention(self) -> Attention:
        config = self.config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"self_attn.q_proj": width, "self_attn.k_proj": kv_width, "self_attn.v_proj": kv_width}
        return Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv=self._fused(parts, config.attention_bias),
            out=self._linear("self_attn.o_proj", config.hidden_size, width),
            qk_norm=self._qk_norm() if config.qk_norm else None,
        )

    def _qk_norm(self) -> QKNorm:
        q, k = (self._take(f"self_attn.{n}_norm.weight", self.config.head_dim).float() for n in ("q", "k"))
        return QKNorm(q, k, self.config.rms_norm_eps)

    def _mlp(self) -> GatedMLP:
        size = self.config.intermediate_size
        return GatedMLP(
            gate_up=self._fused({"mlp.gate_proj": size, "mlp.up_proj": size}, bias=False),
            down=self._linear("mlp.down_proj", self.config.hidden_size, size),
        )

    def _fused(self, parts: dict[str, int], bias: bool) -> Linear:
        """One matrix product for several projections of the same input: name |-> out_features."""
        weight = torch.cat([self._take(f"{n}.weight", rows, self.config.hidden_size) for n, rows in parts.items()])
        biases = torch.cat([self._take(f"{n}.bias", rows) for n, rows in parts.items()]) if bias else None
        return self.kernels.pack_linear(weight, biases, self.dtype)

    def _linear(self, name: str, out_features: int, in_features: int) -> Linear:
        return self.kernels.pack_linear(self._take(f"{name}.weight", out_features, in_features), None, self.dtype)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._take(f"{name}.weight", self.config.hidden_size).float(), self.config.rms_norm_eps)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self.weights.take(f"model.layers.{self.index}.{name}", *shape)
