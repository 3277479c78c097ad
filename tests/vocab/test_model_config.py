import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigurationError
from baton.vocab.model_config import ModelConfig, RopeScaling, load_model_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def load(folder: Path, changes: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    raw = {key: value for key, value in (LLAMA | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(folder)


def test_llama_as_transformers_4_writes_it(tmp_path: Path) -> None:
    assert load(tmp_path, {}) == ModelConfig(
        family="llama",
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        rope_scaling=None,
        tie_word_embeddings=True,
        attention_bias=False,
        qk_norm=False,
        eos_token_ids=(2,),
        bos_token_id=1,
        dtype="bfloat16",
    )


def test_transformers_5_spelling_gives_the_same(tmp_path: Path) -> None:
    new = {
        "rope_theta": "absent",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "torch_dtype": "absent",
        "dtype": "bfloat16",
    }
    assert load(tmp_path, new) == load(tmp_path, {})


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": "absent", "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 1e5}},
    ],
)
def test_linear_rope(tmp_path: Path, spelling: dict[str, Any]) -> None:
    config = load(tmp_path, spelling)
    assert (config.rope_theta, config.rope_scaling) == (100000.0, RopeScaling("linear", 2.0))


def test_llama3_rope(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert load(tmp_path, {"rope_scaling": scaling}).rope_scaling == expected
    del scaling["original_max_position_embeddings"]
    with pytest.raises(ConfigurationError, match=r"rope_scaling\.original_max_position_embeddings"):
        load(tmp_path, {"rope_scaling": scaling})


def test_absent_fields_get_the_defaults_of_the_family(tmp_path: Path) -> None:
    names = ["num_key_value_heads", "rope_theta", "tie_word_embeddings", "rms_norm_eps", "torch_dtype"]
    config = load(tmp_path, dict.fromkeys([*names, "bos_token_id", "eos_token_id"], "absent"))
    assert (config.num_kv_heads, config.rope_theta, config.tie_word_embeddings) == (9, 10000.0, False)
    assert (config.rms_norm_eps, config.dtype) == (1e-6, "float32")
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    assert load(tmp_path, {}, {"eos_token_id": [5, 7]}).eos_token_ids == (5, 7)
    assert load(tmp_path, {}, {"eos_token_id": 5}).eos_token_ids == (5,)
    assert load(tmp_path, {}, {"temperature": 0.6}).eos_token_ids == (2,)


def test_other_families(tmp_path: Path) -> None:
    mistral = load(tmp_path, {"model_type": "mistral", "sliding_window": None})
    assert (mistral.attention_bias, mistral.qk_norm) == (False, False)
    window = {"sliding_window": 4096, "use_sliding_window": False}
    qwen2 = load(tmp_path, {"model_type": "qwen2", **window})
    assert (qwen2.attention_bias, qwen2.qk_norm) == (True, False)
    qwen3 = load(tmp_path, {"model_type": "qwen3", "head_dim": 128, **window})
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"model_type": "gemma3"}, "model_type", "'gemma3'"),
        ({"model_type": ["llama"]}, "model_type", "['llama']"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'"),
        ({"mlp_bias": True}, "mlp_bias", "True"),
        ({"attention_bias": True}, "attention_bias", "True"),
        ({"sliding_window": 4096}, "sliding_window", "4096"),
        ({"model_type": "mistral"}, "sliding_window", "None"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window", "4096"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window", "True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "sliding_attention"),
        ({"layer_types": 3}, "layer_types", "3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "gptq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type", "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.type", "'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor", "None"),
        ({"rope_scaling": ["linear"]}, "rope_scaling", "['linear']"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
        ({"num_key_value_heads": 2}, "num_key_value_heads", "2"),
        ({"model_type": "qwen2", "num_key_value_heads": "absent"}, "num_key_value_heads", "None"),
        ({"model_type": "qwen3"}, "head_dim", "None"),
        ({"head_dim": 63}, "head_dim", "63"),
        ({"hidden_size": 0}, "hidden_size", "0"),
        ({"hidden_size": "576"}, "hidden_size", "'576'"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "True"),
        ({"vocab_size": "absent"}, "vocab_size", "None"),
        ({"rms_norm_eps": -1}, "rms_norm_eps", "-1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id", "'</s>'"),
        ({"eos_token_id": [1, -2]}, "eos_token_id", "[1, -2]"),
        ({"torch_dtype": "int8"}, "torch_dtype", "'int8'"),
    ],
)
def test_what_would_compute_another_model_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], field: str, value: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, changes)
    assert f"{field} is " in str(caught.value)
    assert value in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", '{"a":', "null", "\xff"])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json: No such file"):
        load_model_config(tmp_path)
