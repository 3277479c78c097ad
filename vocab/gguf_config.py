"""The content of config.json from GGUF metadata: what the file says, and what llama.cpp knows of an architecture."""

from typing import Any

import numpy as np

from .gguf_architectures import ARCHITECTURES, LLAMA, MIXTRAL, Architecture
from .gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_CONSTANTS: dict[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Scores are divided by the root of head_dim, but in the largest of the Gemmas by that of hidden_size / heads. The files
# do not say so; llama.cpp knows them by their number of layers.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}


def architecture_of(file: GgufFile) -> Architecture:
    """Raises ConfigurationError for one that is not converted."""
    name = file.require("general.architecture")
    if name not in ARCHITECTURES:
        file.refuse(f"a model of architecture {name!r} is not converted from GGUF; {', '.join(ARCHITECTURES)} are")
    return MIXTRAL if name == "llama" and file.get("llama.expert_count", 0) else ARCHITECTURES[name]


def model_config(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Raises ConfigurationError for metadata that Baton would not compute."""
    name = file.require("general.architecture")
    hidden_size = file.require(f"{name}.embedding_length")
    num_heads = file.require(f"{name}.attention.head_count")
    head_dim = file.get(f"{name}.attention.key_length", hidden_size // num_heads)
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden_size,
        "intermediate_size": file.require(f"{name}.feed_forward_length"),
        "num_hidden_layers": file.require(f"{name}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get(f"{name}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": len(file.require("tokenizer.ggml.tokens")),
        "max_position_embeddings": file.require(f"{name}.context_length"),
        "rms_norm_eps": file.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number(f"{name}.rope.freq_base", 1e6 if name == "gemma3" else 1e4),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
    }
    file.require_only(f"{name}.attention.value_length", head_dim)
    config |= _rope(file, name, head_dim, config["rope_theta"])
    match architecture.model_type:
        case "mixtral":
            config["num_local_experts"] = file.require(f"{name}.expert_count")
            config["num_experts_per_tok"] = file.require(f"{name}.expert_used_count")
        case "phi3":
            config["sliding_window"] = file.get(f"{name}.attention.sliding_window") or None
        case "gemma2" | "gemma3_text":
            config |= _gemma(file, name, config)
        case _:
            file.require_only(f"{name}.expert_count", 0)
            file.require_only(f"{name}.attention.sliding_window", 0, None)
    return config


def _gemma(file: GgufFile, name: str, config: dict[str, Any]) -> dict[str, Any]:
    is_largest = config["num_hidden_layers"] == _LARGEST_GEMMA[name]
    by_heads = config["hidden_size"] // config["num_attention_heads"]
    said: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": by_heads if is_largest else config["head_dim"],
        "sliding_window": file.require(f"{name}.attention.sliding_window"),
    }
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} if name == "gemma2" else {}
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        said[field] = file.number(f"{name}.{field}", caps.get(field, 0.0)) or None
    if name == "gemma3":
        file.require_only("gemma3.attention.sliding_window_pattern", 6)
        said["rope_local_base_freq"] = file.number("gemma3.rope.freq_base_swa", 1e4)
    return said


def _rope(file: GgufFile, name: str, head_dim: int, theta: float) -> dict[str, Any]:
    file.require_only(f"{name}.rope.scaling.type", "none", "linear")
    rotary_dim = file.get(f"{name}.rope.dimension_count", head_dim)
    said: dict[str, Any] = {}
    if name == "phi3" and rotary_dim < head_dim:
        said["partial_rotary_factor"] = rotary_dim / head_dim
    else:
        file.require_only(f"{name}.rope.dimension_count", head_dim)
    if file.get(f"{name}.rope.scaling.type", "none") == "linear":
        said["rope_scaling"] = {"rope_type": "linear", "factor": file.number(f"{name}.rope.scaling.factor")}
    if ROPE_FACTORS in file.tensors and ARCHITECTURES[name] is LLAMA:
        said["rope_scaling"] = _llama3_scaling(file, head_dim, theta)
    return said


def _llama3_scaling(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any]:
    """The parameters behind the factors by which Llama 3.1 and its successors divide their rotary frequencies.

    GGUF keeps only the factors, one per frequency. The parameters follow from the largest one and the constants of
    Meta's models; that they give the same factors is checked.
    """
    factors = np.asarray(file.tensors[ROPE_FACTORS].data, dtype=np.float32)
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3_CONSTANTS}
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    # 0 for waves longer than the original context / low, 1 for those shorter than it / high
    kept = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - kept) / scaling["factor"] + kept)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        file.refuse(f"{ROPE_FACTORS} holds rotary factors that are not those of Llama 3")
    return scaling
