"""Every architecture: a checkpoint of transformers, written as llama.cpp's converter would, comes back as it was.

Names of tensors are taken from the gguf package; what llama.cpp changes in values is done here by hand.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from baton.core.errors import ConfigurationError
from baton.vocab.gguf_convert import convert_gguf
from baton.vocab.model_config import ModelConfig, load_model_config

NUM_LAYERS = 2
VOCABULARY = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
TYPES = [2, 3, 3, *[6] * 256, 1, 1, 1]
F32 = gguf.GGMLQuantizationType.F32

# GGUF architecture |-> transformers' model type, its settings, and the metadata that only this architecture has
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama with experts": (
        "mixtral",
        {"num_local_experts": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"expert_count": 3, "expert_used_count": 2},
    ),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "gemma2": (
        "gemma2",
        {"query_pre_attn_scalar": 16, "sliding_window": 9},
        {"attention.sliding_window": 9, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 16, "sliding_window": 9},
        {"attention.sliding_window": 9, "rope.freq_base": 1e6},
    ),
    "phi3": (
        "phi3",
        {
            "pad_token_id": 0,
            "sliding_window": 9,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
        {"attention.sliding_window": 9, "rope.dimension_count": 12},
    ),
}


def as_llama_cpp(
    folder: Path, architecture: str, config: ModelConfig, permute: Callable[[np.ndarray, int], np.ndarray]
) -> dict[str, np.ndarray]:
    """GGUF name |-> values."""
    code = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(code, NUM_LAYERS)
    given = load_file(folder / "model.safetensors")
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, values in given.items():
        if architecture == "llama" and "q_proj" in name:
            values = permute(values, config.num_heads)
        elif architecture == "llama" and "k_proj" in name:
            values = permute(values, config.num_kv_heads)
        elif architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            part = after.split(".")[1]
            experts.setdefault(f"{before}.experts.{part}.weight", []).append(values)
            continue
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    for name, parts in experts.items():  # in the order of their names, of which there are fewer than ten
        tensors[names.get_name(name, try_suffixes=(".weight",))] = np.stack(parts)
    assert None not in tensors
    return tensors


def write(
    path: Path,
    architecture: str,
    config: ModelConfig,
    said: dict[str, Any],
    tensors: dict[str, np.ndarray],
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """`types`: of tensors that are given as raw blocks; all others are float32."""
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    } | said
    for key, value in values.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types(TYPES)
    writer.add_token_scores([0.0] * len(VOCABULARY))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=(types or {}).get(name, F32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_comes_back(case: str, save_model, permute, tmp_path: Path, target: Path, progress) -> None:
    architecture = case.partition(" ")[0]
    family, settings, said = CASES[case]
    folder = save_model(family, vocab_size=len(VOCABULARY), **settings)
    config = load_model_config(folder)
    tensors = as_llama_cpp(folder, architecture, config, permute)
    assert convert_gguf(write(tmp_path / "x.gguf", architecture, config, said, tensors), target, progress) == ""
    back = load_model_config(target)
    ends = {"eos_token_ids": (2,), "bos_token_id": 1}
    assert back == msgspec.structs.replace(config, **ends)
    given, written = load_file(folder / "model.safetensors"), load_file(target / "model.safetensors")
    assert given.keys() == written.keys()
    for name, values in given.items():
        tolerance = 1e-6 if architecture.startswith("gemma") else 0
        np.testing.assert_allclose(written[name], values, rtol=tolerance, atol=0, err_msg=name)


@pytest.mark.parametrize(("name", "layers", "scalar"), [("gemma2", 46, 8), ("gemma3", 62, 8), ("gemma2", 42, 16)])
def test_the_largest_gemma_scales_scores_by_hidden_size(name, layers, scalar, save_model, tmp_path: Path) -> None:
    from baton.vocab.gguf_config import architecture_of, model_config
    from baton.vocab.gguf_file import GgufFile

    family, settings, said = CASES[name]
    config = load_model_config(save_model(family, vocab_size=len(VOCABULARY), **settings))
    config = msgspec.structs.replace(config, num_layers=layers)
    file = GgufFile(write(tmp_path / "x.gguf", name, config, said, {"x": np.zeros(1, np.float32)}))
    assert model_config(file, architecture_of(file))["query_pre_attn_scalar"] == scalar  # 48 / 6 or 16


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen2", {"rope.scaling.factor": 4.0, "expert_count": 4}, "qwen2.expert_count is 4"),
        ("qwen3", {"rope.dimension_count": 8}, "qwen3.rope.dimension_count is 8"),
        ("gemma3", {"attention.sliding_window_pattern": 4}, "gemma3.attention.sliding_window_pattern is 4"),
        ("phi3", {"attention.value_length": 24}, "phi3.attention.value_length is 24"),
        ("gemma2", {"tensor": "blk.0.attn_q.bias"}, "has a tensor blk.0.attn_q.bias that is not supported"),
        ("phi3", {"tensor": "rope_factors_long.weight"}, "has a tensor rope_factors_long.weight"),
        ("qwen2", {"tensor": "rope_freqs.weight"}, "has a tensor rope_freqs.weight"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    case: str, changes: dict[str, Any], message: str, save_model, permute, tmp_path: Path, target: Path, progress
) -> None:
    family, settings, said = CASES[case]
    folder = save_model(family, vocab_size=len(VOCABULARY), **settings)
    config = load_model_config(folder)
    tensors = as_llama_cpp(folder, case, config, permute)
    if "tensor" in changes:
        tensors[changes.pop("tensor")] = np.ones(8, np.float32)
    path = write(tmp_path / "x.gguf", case, config, said | changes, tensors)
    with pytest.raises(ConfigurationError) as caught:
        convert_gguf(path, target, progress)
    assert message in str(caught.value)


# Those that gguf itself cannot quantise get blocks of random bytes, whose half-precision scales are set to be finite.
BLOCK_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_values_of_every_type(kind: str, save_model, permute, tmp_path: Path, target: Path, progress) -> None:
    folder = save_model("qwen3", vocab_size=len(VOCABULARY), hidden_size=256, intermediate_size=256, head_dim=128)
    config = load_model_config(folder)
    tensors = as_llama_cpp(folder, "qwen3", config, permute)
    quantisation = gguf.GGMLQuantizationType[kind]
    name, random = "blk.1.ffn_down.weight", np.random.default_rng(1)
    block, size = gguf.GGML_QUANT_SIZES[quantisation]
    if kind in BLOCK_SCALES:
        blocks = random.integers(0, 256, (tensors[name].size // block, size), dtype=np.uint8)
        for at in BLOCK_SCALES[kind]:
            blocks[:, at : at + 2] = random.uniform(-0.01, 0.01, (len(blocks), 1)).astype(np.float16).view(np.uint8)
        raw = blocks.reshape(256, -1)
    else:
        raw = gguf.quants.quantize(tensors[name], quantisation)
    path = write(tmp_path / "x.gguf", "qwen3", config, {}, {**tensors, name: raw}, {name: quantisation})
    convert_gguf(path, target, progress)
    values = gguf.quants.dequantize(raw, quantisation)
    assert np.isfinite(values).all()
    assert values.std() > 0
    written = load_file(target / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert written.dtype == (np.float32 if kind in ("F32", "BF16") else np.float16)
    np.testing.assert_array_equal(written, values.astype(written.dtype))
