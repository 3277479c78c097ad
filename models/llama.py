"""The Llama shape: Llama, Mistral, Qwen2 and Qwen3 differ only in what their configs say. Others differ from it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import ConfigurationError
from ..kernels import AttentionRule, KernelSet, Linear, QKNorm, RopeAngles
from ..vocab.model_config import ModelConfig
from .decoder import DecoderModel
from .layers import Attention, DecoderLayer, Embedding, GatedMLP, RMSNorm, SparseMLP
from .rope import inverse_frequencies, local_inverse_frequencies
from .weights import WeightReader


@dataclass(frozen=True, slots=True)
class LlamaBuilder:
    """Reads and packs the weights under the names Hugging Face gives them. A family overrides where it differs."""

    config: ModelConfig
    weights: WeightReader
    kernels: KernelSet
    dtype: str  # of the linear layers

    def model(self) -> DecoderModel:
        config, kernels = self.config, self.kernels
        embedding = self.weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        if self.weights.device.type != "cpu":
            embedding = embedding.to(kernels.activation_dtype)
        # Packing takes memory for a moment. The head, the largest matrix, comes while little else is there.
        head = kernels.pack_head(self.head(embedding), self.dtype)
        self.weights.release()
        self.weights.ignore("rotary_emb.inv_freq")  # old files store the frequencies, which follow from the config
        return DecoderModel(
            kernels=kernels,
            embedding=Embedding(embedding, kernels.activation_dtype, self.embedding_scale()),
            rotaries=self.rotaries(),
            layers=tuple(self.released(index) for index in range(config.num_layers)),
            norm=self.norm("model.norm"),
            lm_head=head,
            logit_soft_cap=config.logit_soft_cap,
        )

    def head(self, embedding: Tensor) -> Tensor:
        if not self.config.tie_word_embeddings:
            return self.weights.take("lm_head.weight", self.config.vocab_size, self.config.hidden_size)
        self.weights.ignore("lm_head.weight")  # some files store the tied matrix twice
        return embedding

    def embedding_scale(self) -> float:
        return 1.0

    def rotaries(self) -> tuple[RopeAngles, ...]:
        """One for each base: that of all layers, and that of layers with a window where it is another."""
        config, scaling = self.config, self.config.rope_scaling
        plain = [(inverse_frequencies(config), 1.0 if scaling is None else scaling.attention_factor)]
        local = [(local_inverse_frequencies(config), 1.0)] if config.local_rope_theta else []
        return tuple(
            self.kernels.pack_rope(frequencies.to(self.weights.device), config.max_position_embeddings, scale)
            for frequencies, scale in plain + local
        )

    def released(self, index: int) -> DecoderLayer:
        layer = self.layer(f"model.layers.{index}", index)
        self.weights.release()
        return layer

    def layer(self, name: str, index: int) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=self.norm(f"{name}.input_layernorm"),
            attention=self.attention(f"{name}.self_attn", index),
            mlp_norm=self.norm(f"{name}.post_attention_layernorm"),
            mlp=self.mlp(name, index),
        )

    def attention(self, name: str, index: int) -> Attention:
        config = self.config
        window = config.windows[index]
        return Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv=self.qkv(name),
            out=self.linear(
                f"{name}.o_proj", config.hidden_size, config.num_heads * config.head_dim, config.output_bias
            ),
            qk_norm=self.qk_norm(name) if config.qk_norm else None,
            rule=AttentionRule(config.attention_scale, window, config.attention_soft_cap),
            rope=1 if window and config.local_rope_theta else 0,
        )

    def qkv(self, name: str) -> Linear:
        config = self.config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {f"{name}.q_proj": width, f"{name}.k_proj": kv_width, f"{name}.v_proj": kv_width}
        return self.fused(parts, config.attention_bias)

    def qk_norm(self, name: str) -> QKNorm:
        q, k = (self.norm_weight(f"{name}.{part}_norm", self.config.head_dim) for part in ("q", "k"))
        return QKNorm(q, k, self.config.rms_norm_eps)

    def mlp(self, name: str, index: int) -> GatedMLP | SparseMLP:
        config = self.config
        return GatedMLP(
            gate_up=self.gate_up(f"{name}.mlp"),
            down=self.linear(f"{name}.mlp.down_proj", config.hidden_size, config.intermediate_size, config.mlp_bias),
            is_gelu=config.activation == "gelu",
        )

    def gate_up(self, name: str) -> Linear:
        size = self.config.intermediate_size
        return self.fused({f"{name}.gate_proj": size, f"{name}.up_proj": size}, self.config.mlp_bias)

    def sparse_mlp(self, router: str, experts: str, parts: tuple[str, str, str]) -> SparseMLP:
        """`experts` names a layer's experts up to their number; `parts` are an expert's gate, up and down."""
        config, wanted = self.config, self.config.experts
        assert wanted is not None
        if self.dtype == "int8":
            raise ConfigurationError(
                f"dtype 'int8' is not supported for the experts of {config.family!r}. Use --dtype bfloat16."
            )
        shape = (wanted.intermediate_size, config.hidden_size)

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for expert in range(wanted.num_experts):
                gate, up, down = (f"{experts}.{expert}.{part}.weight" for part in parts)
                gate_up = self.weights.take_stacked({gate: shape, up: shape}, self.packed_from())
                yield gate_up, self.weights.take(down, *reversed(shape))
                self.weights.release()

        return SparseMLP(
            # Which experts a token goes to must not depend on rounding.
            router=self.kernels.pack_head(
                self.weights.take(f"{router}.weight", wanted.num_experts, config.hidden_size), "float32"
            ),
            experts=self.kernels.pack_experts(
                pairs(), wanted.num_experts, wanted.num_chosen, renormalize=wanted.renormalize, dtype=self.dtype
            ),
        )

    def fused(self, parts: dict[str, int], bias: bool) -> Linear:
        """One matrix product for several projections of the same input: name |-> out_features."""
        matrices = {f"{name}.weight": (rows, self.config.hidden_size) for name, rows in parts.items()}
        biases = torch.cat([self.weights.take(f"{n}.bias", rows) for n, rows in parts.items()]) if bias else None
        return self.kernels.pack_linear(self.weights.take_stacked(matrices, self.packed_from()), biases, self.dtype)

    def packed_from(self) -> torch.dtype:
        """What packing would make of a weight first, so that a stack of weights is copied once."""
        return torch.float32 if self.dtype == "int8" else self.kernels.activation_dtype

    def linear(self, name: str, out_features: int, in_features: int, bias: bool = False) -> Linear:
        biases = self.weights.take(f"{name}.bias", out_features) if bias else None
        weight = self.weights.take(f"{name}.weight", out_features, in_features)
        return self.kernels.pack_linear(weight, biases, self.dtype)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.norm_weight(name, self.config.hidden_size), self.config.rms_norm_eps)

    def norm_weight(self, name: str, size: int) -> Tensor:
        return self.weights.take(f"{name}.weight", size).float()
