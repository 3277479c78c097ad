"""GGUF -> Hugging Face folder: config.json, model.safetensors, tokenizer.json, tokenizer_config.json.

Done once per file, because opening a GGUF costs seconds (its vocabulary is parsed in Python) and dequantising more;
a memory-mapped safetensors file costs milliseconds. `gguf` is imported here and nowhere else.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigurationError
from .gguf_tokenizer import build_tokenizer, build_tokenizer_config
from .progress import Progress
from .safetensors_stream import TensorSpec, aligned_order, write_safetensors

# GGUF name |-> Hugging Face name, once per model and once per layer
_MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_CONSTANTS: dict[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_EXACT_IN_HALF = ("F16",)
_WIDER_THAN_HALF = ("F32", "BF16")
_LARGEST_HALF = 65504.0


def require_gguf() -> None:
    """Raise ConfigurationError unless the optional package `gguf` is installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigurationError(
            "Reading a GGUF file needs the package gguf. Install it with: pip install 'baton-serve[gguf]'"
        )


def unpermute_rope_rows(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of a q or k projection from GGUF's order to Hugging Face's.

    `weight` is [num_heads * head_dim, ...]. GGUF rotates neighbouring rows (2i, 2i + 1) of a head, Hugging Face the
    rows i and head_dim / 2 + i; llama.cpp's converter permutes the rows accordingly (convert_hf_to_gguf.py,
    LlamaModel.permute), and this is the inverse.
    """
    rows = weight.shape[0]
    paired = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)


def convert_gguf(source: Path, target: Path, progress: Progress) -> str:
    """Convert the file `source` into the existing, empty folder `target`.

    Returns the note about quantisation ("weights dequantised from Q4_1", or "" when nothing was lost before).
    Matrices are written as float16, as float32 where the file holds float32 or bfloat16 ones; norms as float32.
    Raises ConfigurationError for anything that Baton would not compute exactly.
    """
    with progress.phase(f"Reading {source.name}"):
        file = GgufFile(source)
        config = _model_config(file)
        tokenizer_metadata = file.metadata_below("tokenizer.ggml.")
        tokenizer = build_tokenizer(tokenizer_metadata)
    converter = _TensorConverter(file, config)
    config["torch_dtype"] = converter.matrix_dtype
    tokenizer_config = build_tokenizer_config(
        tokenizer_metadata, file.get("tokenizer.chat_template"), config["max_position_embeddings"]
    )
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", _generation_config(config, tokenizer_metadata))
    _write_json(target / "tokenizer_config.json", tokenizer_config)
    (target / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    with progress.phase(
        f"Converting {len(converter.specs)} tensors to safetensors (once)", total=len(converter.specs)
    ) as advance:

        def tensors() -> Iterator[NDArray[Any]]:
            for spec in converter.specs:
                yield converter.tensor(spec)
                advance(1)

        write_safetensors(target / "model.safetensors", converter.specs, tensors())
    return converter.quantisation_note()


class GgufFile:
    """An open GGUF file: metadata by key, tensors by name. Raises ConfigurationError when it cannot be read."""

    def __init__(self, path: Path):
        require_gguf()
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise ConfigurationError(
                f"{path} is not a complete GGUF file ({error}). Download or copy it again."
            ) from error
        self._fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        if self.get("split.count", 1) > 1:
            raise ConfigurationError(
                f"{path} is one part of a split GGUF. Join the parts first: llama-gguf-split --merge."
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key: a number, a text or a list."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def metadata_below(self, prefix: str) -> dict[str, Any]:
        """All metadata whose key starts with `prefix`, keyed by the rest."""
        return {
            key.removeprefix(prefix): field.contents() for key, field in self._fields.items() if key.startswith(prefix)
        }

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigurationError(f"{self.path} lacks the metadata {key}. Use another file of this model.")
        return value


def _model_config(file: GgufFile) -> dict[str, Any]:
    """The content of config.json from GGUF metadata of the llama architecture."""
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise ConfigurationError(
            f"{file.path} holds a model of architecture {architecture!r}; only 'llama' is converted from GGUF. "
            "Use the model's Hugging Face folder instead."
        )
    hidden_size = file.require("llama.embedding_length")
    num_heads = file.require("llama.attention.head_count")
    head_dim = file.get("llama.attention.key_length", hidden_size // num_heads)
    _refuse_unknown_features(file, head_dim)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": file.require("llama.feed_forward_length"),
        "num_hidden_layers": file.require("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get("llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": len(file.require("tokenizer.ggml.tokens")),
        "max_position_embeddings": file.require("llama.context_length"),
        "rms_norm_eps": _shortest(file.require("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(file.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
    }
    if file.get("llama.rope.scaling.type", "none") == "linear":
        factor = _shortest(file.require("llama.rope.scaling.factor"))
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    if _ROPE_FACTORS in file.tensors:
        config["rope_scaling"] = _llama3_scaling(file, head_dim, config["rope_theta"])
    return config


def _llama3_scaling(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any]:
    """The parameters behind the factors by which Llama 3.1 and its successors divide their rotary frequencies.

    GGUF keeps only the factors, one per frequency. The parameters follow from the largest one and the constants of
    Meta's models; that they give the same factors is checked.
    """
    factors = np.asarray(file.tensors[_ROPE_FACTORS].data, dtype=np.float32)
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3_CONSTANTS}
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    # 0 for waves longer than the original context / low, 1 for those shorter than it / high
    kept = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - kept) / scaling["factor"] + kept)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ConfigurationError(
            f"{file.path}: {_ROPE_FACTORS} holds rotary factors that are not those of Llama 3. "
            "Use the model's Hugging Face folder instead."
        )
    return scaling


def _refuse_unknown_features(file: GgufFile, head_dim: int) -> None:
    only: dict[str, tuple[Any, ...]] = {
        "llama.rope.scaling.type": ("none", "linear"),
        "llama.expert_count": (0,),
        "llama.rope.dimension_count": (head_dim,),
        "llama.attention.value_length": (head_dim,),
    }
    for key, allowed in only.items():
        value = file.get(key, allowed[0])
        if value not in allowed:
            raise ConfigurationError(
                f"{file.path}: {key} is {value!r}, supported is {' or '.join(map(repr, allowed))}. Use another model."
            )


def _generation_config(config: dict[str, Any], tokenizer_metadata: dict[str, Any]) -> dict[str, Any]:
    """End-of-sequence ids: besides eos, GGUF names the end of a turn (eot) and of a message (eom)."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [tokenizer_metadata[name] for name in names if tokenizer_metadata.get(name) is not None]
    return {"bos_token_id": config["bos_token_id"], "eos_token_id": list(dict.fromkeys(ends))}


class _TensorConverter:
    """Which tensors to write, and each one's values on demand."""

    def __init__(self, file: GgufFile, config: dict[str, Any]):
        self._file = file
        self._heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"],
        }
        self._sources = _tensor_names(file, config)
        matrices = [file.tensors[name] for name in self._sources.values() if len(file.tensors[name].shape) > 1]
        self._matrix_types = {tensor.tensor_type.name: 0 for tensor in matrices}
        for tensor in matrices:
            self._matrix_types[tensor.tensor_type.name] += int(tensor.n_elements)
        wide = any(name in _WIDER_THAN_HALF for name in self._matrix_types)
        self.matrix_dtype = "float32" if wide else "float16"
        self.specs = aligned_order(self._spec(name) for name in self._sources)

    def _spec(self, name: str) -> TensorSpec:
        shape = tuple(int(n) for n in reversed(self._file.tensors[self._sources[name]].shape))
        return TensorSpec(name, self.matrix_dtype if len(shape) > 1 else "float32", shape)

    def tensor(self, spec: TensorSpec) -> NDArray[Any]:
        """The values of one tensor in the dtype, shape and row order that `spec` and Hugging Face want."""
        from gguf.quants import dequantize

        source = self._file.tensors[self._sources[spec.name]]
        try:
            values = dequantize(source.data, source.tensor_type).reshape(spec.shape)
        except NotImplementedError as error:
            raise ConfigurationError(
                f"{self._file.path}: {source.name} is of type {source.tensor_type.name}, which cannot be "
                "dequantised. Use a file of another quantisation."
            ) from error
        projection = spec.name.split(".")[-2]
        if projection in self._heads:
            values = unpermute_rope_rows(values, self._heads[projection])
        if spec.dtype == "float16" and not np.abs(values).max(initial=0.0) <= _LARGEST_HALF:
            raise ConfigurationError(
                f"{self._file.path}: {source.name} has values that float16 cannot hold. "
                "Use the model's Hugging Face folder instead."
            )
        return values.astype(spec.dtype)

    def quantisation_note(self) -> str:
        """Names the type that most weights are stored in, if it is one that lost information."""
        main = max(self._matrix_types, key=lambda name: self._matrix_types[name])
        exact = main in (*_EXACT_IN_HALF, *_WIDER_THAN_HALF)
        return "" if exact else f"weights dequantised from {main}"


def _tensor_names(file: GgufFile, config: dict[str, Any]) -> dict[str, str]:
    """Hugging Face name |-> GGUF name; raises when a tensor is missing or one is not understood."""
    names = {f"{theirs}.weight": f"{ours}.weight" for ours, theirs in _MODEL_TENSORS.items()}
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = "output.weight"
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs in _LAYER_TENSORS.items():
            names[f"model.layers.{layer}.{theirs}.weight"] = f"blk.{layer}.{ours}.weight"
    missing = sorted(set(names.values()) - set(file.tensors))
    unknown = sorted(set(file.tensors) - set(names.values()) - {_ROPE_FACTORS})
    if missing or unknown:
        what = f"lacks the tensor {missing[0]}" if missing else f"has a tensor {unknown[0]} that is not supported"
        raise ConfigurationError(f"{file.path} {what}. Use the model's Hugging Face folder instead.")
    return names


def _shortest(value: float) -> float:
    """GGUF stores float32; its shortest decimal is the number that was meant (1e-05, not 9.9999997e-06)."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))
