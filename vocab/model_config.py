"""ModelConfig: the shape of a model, read from a Hugging Face config.json.

Everything that changes what the model computes is either understood here or refused by name: a feature that
is silently ignored would give wrong tokens. Both spellings of the rotary settings are read (transformers 4:
`rope_theta`, `rope_scaling`; transformers 5: `rope_parameters`).
"""

from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ..core.errors import ConfigurationError
from .json_file import read_json_object, read_json_object_if_present

DTYPES = ("float32", "float16", "bfloat16")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# Settings that must have one of these values (or be absent), in every family: others compute another model.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (None,),
    "use_sliding_window": (False,),
}


class RopeScaling(msgspec.Struct, frozen=True):
    """How the rotary frequencies are stretched beyond the context of the training.

    `linear`: all frequencies divided by `factor`. `llama3`: the low frequencies only, as Llama 3.1 defines it,
    with a smooth passage between the wavelengths `original_max_position_embeddings / {high,low}_freq_factor`.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


class ModelConfig(msgspec.Struct, frozen=True):
    """The shape of a decoder-only model of the Llama shape.

    Rows of the projections: q `num_heads * head_dim`, k and v `num_kv_heads * head_dim`, from `hidden_size`.
    `attention_bias`: q, k and v (not o) have a bias. `qk_norm`: q and k pass an RMSNorm over head_dim before
    the rotation. `max_position_embeddings` is the context in tokens. `dtype` is that of the weights on disk.
    `eos_token_ids` follows generation_config.json where it names any, else config.json, as transformers does.
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


def load_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json`) of a model folder.

    Raises ConfigurationError naming the field and its value when Baton would not compute this model exactly.
    """
    path = folder / "config.json"
    reader = _Reader(path, read_json_object(path))
    generation = _Reader(
        folder / "generation_config.json", read_json_object_if_present(folder / "generation_config.json")
    )
    eos = generation.token_ids("eos_token_id") or reader.token_ids("eos_token_id")
    return _model_config(reader, eos)


def _model_config(reader: "_Reader", eos_token_ids: tuple[int, ...]) -> ModelConfig:
    family = reader.choice("model_type", FAMILIES)
    _refuse_unknown_features(reader, family)
    hidden_size = reader.positive("hidden_size")
    num_heads = reader.positive("num_attention_heads")
    # What an absent field means differs by family in transformers, so only unambiguous ones have a default.
    num_kv_heads = reader.positive("num_key_value_heads", default=num_heads if family == "llama" else 0)
    head_dim = reader.positive("head_dim", default=hidden_size // num_heads if family != "qwen3" else 0)
    if num_heads % num_kv_heads:
        reader.refuse("num_key_value_heads", f"it does not divide num_attention_heads {num_heads}")
    if head_dim % 2:
        reader.refuse("head_dim", "the rotary embedding needs an even number")
    rope_theta, rope_scaling = _rope(reader)
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=reader.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=reader.positive("vocab_size"),
        max_position_embeddings=reader.positive("max_position_embeddings"),
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        attention_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        eos_token_ids=eos_token_ids,
        bos_token_id=next(iter(reader.token_ids("bos_token_id")), None),
        dtype=reader.dtype(),
    )


def _refuse_unknown_features(reader: "_Reader", family: str) -> None:
    for field, allowed in _ONLY.items():
        reader.require_only(field, allowed)
    # Llama's attention_bias covers the output projection too; Qwen2 has q, k, v biases in any case.
    if family != "qwen2" and reader.get("attention_bias", False) is not False:
        reader.refuse("attention_bias", "only false is supported for this family")
    # Qwen writes a window that `use_sliding_window` (checked above) switches off.
    if not family.startswith("qwen") and reader.get("sliding_window", None) is not None:
        reader.refuse("sliding_window", "windowed attention is not supported")
    if family == "mistral" and not reader.has("sliding_window"):
        reader.refuse("sliding_window", "absent means a window of 4096 in this family, which is not supported")
    layer_types = reader.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        reader.refuse("layer_types", "only full_attention is supported")


def _rope(reader: "_Reader") -> tuple[float, RopeScaling | None]:
    field = "rope_parameters" if reader.get("rope_parameters", None) else "rope_scaling"
    raw = reader.get(field, {})
    if not isinstance(raw, dict):
        reader.refuse(field, "it must be an object")
    scaling = _Reader(reader.path, raw, prefix=f"{field}.")
    theta = scaling.number("rope_theta", default=reader.number("rope_theta", default=10000.0))
    scaling.require_only("partial_rotary_factor", (1, 1.0))
    # Transformers 4 wrote `type` before it wrote `rope_type`.
    key = "rope_type" if "rope_type" in raw else "type"
    rope_type = scaling.choice(key, ("default", "linear", "llama3"), default="default")
    if rope_type == "default":
        return theta, None
    factor = scaling.number("factor")
    if rope_type == "linear":
        return theta, RopeScaling("linear", factor)
    return theta, RopeScaling(
        "llama3",
        factor,
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position_embeddings=scaling.positive("original_max_position_embeddings"),
    )


class _Reader:
    """Typed access to one JSON object; errors name the file, the field and its value. null means absent."""

    def __init__(self, path: Path, raw: dict[str, Any], prefix: str = ""):
        self.path = path
        self._raw = raw
        self._prefix = prefix

    def has(self, field: str) -> bool:
        return field in self._raw

    def get(self, field: str, default: Any) -> Any:
        value = self._raw.get(field)
        return default if value is None else value

    def refuse(self, field: str, why: str) -> NoReturn:
        value = repr(self._raw.get(field))
        shown = value if len(value) <= 80 else value[:77] + "..."
        raise ConfigurationError(
            f"{self.path}: {self._prefix}{field} is {shown}: {why}. "
            "Choose another model, or run this one with a server that supports it."
        )

    def require_only(self, field: str, allowed: tuple[Any, ...]) -> None:
        if self.get(field, allowed[0]) not in allowed:
            self.refuse(field, f"only {allowed[0]!r} is supported")

    def choice(self, field: str, allowed: tuple[str, ...], default: str = "") -> str:
        value = self.get(field, default)
        if value not in allowed:
            self.refuse(field, f"supported are {', '.join(allowed)}")
        return str(value)

    def positive(self, field: str, default: int = 0) -> int:
        value = self.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.refuse(field, "a positive whole number is needed")
        return int(value)

    def number(self, field: str, default: float = 0.0) -> float:
        value = self.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.refuse(field, "a positive number is needed")
        return float(value)

    def flag(self, field: str) -> bool:
        value = self.get(field, False)
        if not isinstance(value, bool):
            self.refuse(field, "true or false is needed")
        return bool(value)

    def token_ids(self, field: str) -> tuple[int, ...]:
        value = self.get(field, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            self.refuse(field, "a token id or a list of them is needed")
        return tuple(ids)

    def dtype(self) -> str:
        field = "dtype" if self.get("dtype", None) else "torch_dtype"
        return self.choice(field, DTYPES, default="float32")
