"""GGUF -> Hugging Face folder: config.json, model.safetensors, tokenizer.json, tokenizer_config.json.

Done once per file, because opening a GGUF costs seconds (its vocabulary is parsed in Python) and dequantising more;
a memory-mapped safetensors file costs milliseconds.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigurationError
from .gguf_architectures import Architecture
from .gguf_config import ROPE_FACTORS, architecture_of, model_config
from .gguf_file import GgufFile
from .gguf_tokenizer import build_tokenizer, build_tokenizer_config
from .progress import Progress
from .safetensors_stream import TensorSpec, aligned_order, write_safetensors

# GGUF name |-> Hugging Face name, once per model
_MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_EXACT_IN_HALF = ("F16",)
_WIDER_THAN_HALF = ("F32", "BF16")
_LARGEST_HALF = 65504.0


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
    A matrix is written as float16, as float32 where the file holds it in float32 or bfloat16; norms as float32.
    Raises ConfigurationError for anything that Baton would not compute exactly.
    """
    with progress.phase(f"Reading {source.name}"):
        file = GgufFile(source)
        architecture = architecture_of(file)
        config = model_config(file, architecture)
        tokenizer_metadata = file.metadata_below("tokenizer.ggml.")
        tokenizer = build_tokenizer(tokenizer_metadata)
    converter = _TensorConverter(file, architecture, config)
    config["torch_dtype"] = converter.main_dtype
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


def _generation_config(config: dict[str, Any], tokenizer_metadata: dict[str, Any]) -> dict[str, Any]:
    """End-of-sequence ids: besides eos, GGUF names the end of a turn (eot) and of a message (eom)."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [tokenizer_metadata[name] for name in names if tokenizer_metadata.get(name) is not None]
    return {"bos_token_id": config["bos_token_id"], "eos_token_id": list(dict.fromkeys(ends))}


class _Source(NamedTuple):
    """Where a tensor comes from: a GGUF tensor, or one expert's part of it."""

    name: str
    expert: int | None = None


class _TensorConverter:
    """Which tensors to write, and each one's values on demand."""

    def __init__(self, file: GgufFile, architecture: Architecture, config: dict[str, Any]):
        self._file = file
        self._norm_offset = architecture.norm_offset
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        self._permuted = heads if architecture.is_permuted else {}
        self._sources = _tensor_sources(file, architecture, config)
        sizes: dict[str, int] = {}
        for name in {source.name for source in self._sources.values() if len(file.shape(source.name)) > 1}:
            tensor = file.tensors[name]
            sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
        self._main_type = max(sizes, key=lambda name: sizes[name])
        self.main_dtype = _dtype_of(self._main_type)
        self.specs = aligned_order(self._spec(name) for name in self._sources)

    def _spec(self, name: str) -> TensorSpec:
        source = self._sources[name]
        shape = self._file.shape(source.name)[0 if source.expert is None else 1 :]
        dtype = _dtype_of(self._file.tensors[source.name].tensor_type.name)
        return TensorSpec(name, dtype if len(shape) > 1 else "float32", shape)

    def tensor(self, spec: TensorSpec) -> NDArray[Any]:
        """The values of one tensor in the dtype, shape and row order that `spec` and Hugging Face want."""
        values = self._file.values(*self._sources[spec.name])
        projection = spec.name.split(".")[-2]
        if projection in self._permuted:
            values = unpermute_rope_rows(values, self._permuted[projection])
        if self._norm_offset and spec.name.endswith("norm.weight"):
            values = values - np.float32(self._norm_offset)
        if spec.dtype == "float16" and not np.abs(values).max(initial=0.0) <= _LARGEST_HALF:
            self._file.refuse(f"{self._sources[spec.name].name} has values that float16 cannot hold")
        return values.astype(spec.dtype)

    def quantisation_note(self) -> str:
        """Names the type that most weights are stored in, if it is one that lost information."""
        exact = self._main_type in (*_EXACT_IN_HALF, *_WIDER_THAN_HALF)
        return "" if exact else f"weights dequantised from {self._main_type}"


def _dtype_of(gguf_type: str) -> str:
    return "float32" if gguf_type in _WIDER_THAN_HALF else "float16"


def _tensor_sources(file: GgufFile, architecture: Architecture, config: dict[str, Any]) -> dict[str, _Source]:
    """By Hugging Face name; raises when a tensor is missing or one is not understood."""
    sources = {f"{theirs}.weight": _Source(f"{ours}.weight") for ours, theirs in _MODEL_TENSORS.items()}
    if not config["tie_word_embeddings"]:
        sources["lm_head.weight"] = _Source("output.weight")
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs in architecture.layer.items():
            has_bias = architecture.has_biases and ours in ("attn_q", "attn_k", "attn_v")
            for part in ("weight", "bias") if has_bias else ("weight",):
                sources[f"model.layers.{layer}.{theirs}.{part}"] = _Source(f"blk.{layer}.{ours}.{part}")
        for ours, theirs in (architecture.experts or {}).items():
            for expert in range(config["num_local_experts"]):
                name = f"model.layers.{layer}.{theirs.format(expert)}.weight"
                sources[name] = _Source(f"blk.{layer}.{ours}.weight", expert)
    known = {source.name for source in sources.values()}
    missing = sorted(known - set(file.tensors))
    has_factors = config.get("rope_scaling", {}).get("rope_type") == "llama3"
    unknown = sorted(set(file.tensors) - known - ({ROPE_FACTORS} if has_factors else set()))
    if missing or unknown:
        what = f"lacks the tensor {missing[0]}" if missing else f"has a tensor {unknown[0]} that is not supported"
        raise ConfigurationError(f"{file.path} {what}. Use the model's Hugging Face folder instead.")
    return sources


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))
