"""ModelConfig: the shape of a model, read from a Hugging Face config.json.

Everything that changes what the model computes is either understood here or refused by name: a feature that
is silently ignored would give wrong tokens. What is absent has the value that transformers gives it in that family.
"""

from pathlib import Path
from typing import Any

import msgspec

from .config_reader import DTYPES, ConfigReader
from .json_file import read_json_object, read_json_object_if_present
from .rope_config import RopeScaling, read_rope
from .window_config import read_windows

__all__ = ["DTYPES", "FAMILIES", "ExpertsConfig", "ModelConfig", "RopeScaling", "load_model_config"]

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3")
_GEMMA = ("gemma2", "gemma3_text")
_QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text")
_HEAD_DIM_MUST_BE_SAID = ("qwen3", *_GEMMA)  # its default is no function of the other sizes

# Settings that must have one of these values (or be absent), in every family: others compute another model.
_ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "use_bidirectional_attention": (False,),
    "is_decoder": (True, False),
    "add_cross_attention": (False,),
    "norm_bias": (False,),
}


class ExpertsConfig(msgspec.Struct, frozen=True):
    """`layers`: which ones have experts in the place of one feed-forward network.

    A token goes to `num_chosen` of `num_experts`. `renormalize`: their weights are made to add up to 1.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    renormalize: bool
    layers: tuple[int, ...]


class ModelConfig(msgspec.Struct, frozen=True):
    """The shape of a decoder-only model.

    Rows of the projections: q `num_heads * head_dim`, k and v `num_kv_heads * head_dim`, from `hidden_size`.
    `attention_bias`: q, k and v have a bias; `output_bias`: o has; `mlp_bias`: the feed-forward network's have.
    `qk_norm`: q and k pass an RMSNorm over head_dim before the rotation. `max_position_embeddings` is the context in
    tokens. `dtype` is that of the weights on disk. `eos_token_ids` follows generation_config.json where it names any,
    else config.json, as transformers does. `windows`: of each layer, 0 for none. `activation`: `silu`, or `gelu` as
    approximated by tanh. A soft cap of 0 is none. For the rotary ones see RopeConfig.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    windows: tuple[int, ...]
    attention_scale: float
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    activation: str = "silu"
    output_bias: bool = False
    mlp_bias: bool = False
    local_rope_theta: float = 0.0
    partial_rotary_factor: float = 1.0
    experts: ExpertsConfig | None = None


def load_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json`) of a model folder.

    Raises ConfigurationError naming the field and its value when Baton would not compute this model exactly.
    """
    path = folder / "config.json"
    reader = ConfigReader(path, read_json_object(path))
    generation = ConfigReader(
        folder / "generation_config.json", read_json_object_if_present(folder / "generation_config.json")
    )
    eos = generation.token_ids("eos_token_id") or reader.token_ids("eos_token_id")
    return _model_config(reader, eos)


def _model_config(reader: ConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    family = reader.choice("model_type", FAMILIES)
    for field, allowed in _ONLY.items():
        reader.require_only(field, allowed)
    hidden_size = reader.positive("hidden_size")
    num_heads = reader.positive("num_attention_heads")
    # What an absent field means differs by family in transformers, so only unambiguous ones have a default.
    num_kv_heads = reader.positive("num_key_value_heads", default=num_heads if family in ("llama", "phi3") else 0)
    head_dim = reader.positive("head_dim", 0 if family in _HEAD_DIM_MUST_BE_SAID else hidden_size // num_heads)
    if num_heads % num_kv_heads:
        reader.refuse("num_key_value_heads", f"it does not divide num_attention_heads {num_heads}")
    if head_dim % 2:
        reader.refuse("head_dim", "the rotary embedding needs an even number")
    rope = read_rope(reader, family, head_dim)
    num_layers = reader.positive("num_hidden_layers")
    biases = _biases(reader, family)
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=reader.positive("vocab_size"),
        max_position_embeddings=rope.max_positions,
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-5 if family in ("mixtral", "phi3") else 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=family in _GEMMA),
        attention_bias=biases[0],
        qk_norm=family in _QK_NORM,
        eos_token_ids=eos_token_ids,
        bos_token_id=next(iter(reader.token_ids("bos_token_id")), None),
        dtype=reader.dtype(),
        windows=read_windows(reader, family, num_layers),
        attention_scale=(reader.number("query_pre_attn_scalar") if family in _GEMMA else head_dim) ** -0.5,
        attention_soft_cap=_soft_cap(reader, "attn_logit_softcapping", family, 50.0),
        logit_soft_cap=_soft_cap(reader, "final_logit_softcapping", family, 30.0),
        activation=_activation(reader, family),
        output_bias=biases[1],
        mlp_bias=biases[2],
        local_rope_theta=rope.local_theta,
        partial_rotary_factor=rope.partial_factor,
        experts=_experts(reader, family, num_layers),
    )


def _biases(reader: ConfigReader, family: str) -> tuple[bool, bool, bool]:
    """Of q, k and v; of o; of the feed-forward network."""
    if family != "llama":
        reader.require_only("mlp_bias", (False,))
    if family == "qwen2":  # q, k and v have biases in any case, o has none
        return True, False, False
    has_bias = reader.flag("attention_bias")
    if has_bias and family in ("mistral", "mixtral", "phi3"):
        reader.refuse("attention_bias", "only false is supported for this family")
    return has_bias, has_bias, reader.flag("mlp_bias")


def _activation(reader: ConfigReader, family: str) -> str:
    if family not in _GEMMA:
        reader.require_only("hidden_act", ("silu", "swish"))
        return "silu"
    for field in ("hidden_activation", "hidden_act"):
        reader.require_only(field, ("gelu_pytorch_tanh",))
    return "gelu"


def _soft_cap(reader: ConfigReader, field: str, family: str, gemma2_default: float) -> float:
    """0: none. Only Gemma has them; null is none, and absent is Gemma 2's own."""
    if reader.get(field, None) is None:
        return gemma2_default if family == "gemma2" and not reader.has(field) else 0.0
    # Gemma 3 has the field for attention, and its implementation takes no notice of it.
    if family not in _GEMMA or (family == "gemma3_text" and field == "attn_logit_softcapping"):
        reader.refuse(field, "only null is supported for this family")
    return reader.number(field)


def _experts(reader: ConfigReader, family: str, num_layers: int) -> ExpertsConfig | None:
    name = "num_local_experts" if reader.has("num_local_experts") else "num_experts"
    if family not in ("mixtral", "qwen3_moe"):
        if reader.get(name, 0):
            reader.refuse(name, "this family has no experts")
        return None
    num_experts, num_chosen = reader.positive(name), reader.positive("num_experts_per_tok")
    if num_chosen > num_experts:
        reader.refuse("num_experts_per_tok", f"there are {num_experts} experts")
    if family == "mixtral":
        size = reader.positive("intermediate_size")
        return ExpertsConfig(num_experts, num_chosen, size, renormalize=True, layers=tuple(range(num_layers)))
    step, dense = reader.positive("decoder_sparse_step", default=1), reader.whole_numbers("mlp_only_layers")
    return ExpertsConfig(
        num_experts,
        num_chosen,
        reader.positive("moe_intermediate_size"),
        renormalize=reader.flag("norm_topk_prob"),
        layers=tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense),
    )
