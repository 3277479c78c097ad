import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigurationError
from baton.vocab.model_config import ExpertsConfig, ModelConfig, RopeScaling, load_model_config

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


MISTRAL: dict[str, Any] = {"model_type": "mistral", "rope_theta": "absent"}
PHI3: dict[str, Any] = {"model_type": "phi3"}
QWEN2: dict[str, Any] = {"model_type": "qwen2"}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
_GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 144, "tie_word_embeddings": "absent", "rope_theta": "absent"}
GEMMA2: dict[str, Any] = _GEMMA | {"model_type": "gemma2"}
GEMMA3: dict[str, Any] = _GEMMA | {"model_type": "gemma3_text"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


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
        windows=(0,) * 30,
        attention_scale=0.125,
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
    mistral = load(tmp_path, MISTRAL | {"sliding_window": None})
    assert (mistral.attention_bias, mistral.qk_norm, mistral.windows) == (False, False, (0,) * 30)
    llama = load(tmp_path, {"attention_bias": True, "mlp_bias": True})
    assert (llama.attention_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    window = {"sliding_window": 4096, "use_sliding_window": False}
    qwen2 = load(tmp_path, {"model_type": "qwen2", **window})
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = load(tmp_path, {"model_type": "qwen3", "head_dim": 128, **window})
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (MISTRAL, (4096,) * 4),  # absent
        (MISTRAL | {"sliding_window": 7, "layer_types": ["sliding_attention"] * 4}, (7,) * 4),
        (PHI3, (0,) * 4),
        (PHI3 | {"sliding_window": 2047}, (2047,) * 4),
        (QWEN2 | {"sliding_window": 9, "max_window_layers": 1}, (0,) * 4),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (0, 9, 9, 9)),
        (QWEN2 | {"use_sliding_window": True}, (0,) * 4),  # from layer 28 on
        (GEMMA2, (4096, 0, 4096, 0)),
        (GEMMA3 | {"sliding_window": 512, "sliding_window_pattern": 2}, (512, 0, 512, 0)),
        (GEMMA3 | {"sliding_window": 512}, (512,) * 4),  # the sixth layer would be the first without
    ],
)
def test_windows(tmp_path: Path, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert load(tmp_path, changes | {"num_hidden_layers": 4}).windows == windows


def test_gemma(tmp_path: Path) -> None:
    gemma2 = load(tmp_path, GEMMA2)
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap, gemma2.activation) == (50.0, 30.0, "gelu")
    assert (gemma2.attention_scale, gemma2.tie_word_embeddings, gemma2.qk_norm) == (1 / 12, True, False)
    off = load(tmp_path, GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (off.attention_soft_cap, off.logit_soft_cap) == (0.0, 0.0)
    old = load(tmp_path, GEMMA3 | {"rope_theta": 5e5, "rope_local_base_freq": 1e3})
    assert (old.rope_theta, old.local_rope_theta, old.qk_norm, old.attention_soft_cap) == (5e5, 1e3, True, 0.0)
    scaled = load(tmp_path, GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert (scaled.rope_theta, scaled.local_rope_theta) == (1e6, 1e4)
    assert scaled.rope_scaling == RopeScaling("linear", 8.0)


def test_experts(tmp_path: Path) -> None:
    mixtral = load(tmp_path, {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
    assert mixtral.experts == ExpertsConfig(8, 2, 1536, renormalize=True, layers=tuple(range(30)))
    changes = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    qwen3 = load(tmp_path, QWEN3_MOE | changes)
    assert qwen3.experts == ExpertsConfig(8, 2, 96, renormalize=False, layers=(1, 5))
    assert load(tmp_path, {}).experts is None


def test_longrope_keeps_to_the_context_whose_factors_never_change(tmp_path: Path) -> None:
    factors = [1.0 + i / 10 for i in range(24)]
    scaling = {"type": "su", "short_factor": factors, "long_factor": [9.0] * 24}
    changes = {"rope_scaling": scaling, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75}
    config = load(tmp_path, PHI3 | changes)
    assert (config.max_position_embeddings, config.partial_rotary_factor) == (4096, 0.75)
    assert config.rope_scaling is not None
    assert config.rope_scaling.factors == tuple(factors)
    assert config.rope_scaling.attention_factor == pytest.approx((1 + 1 / 12) ** 0.5)  # 8192 is 2 * 4096, 4096 is 2^12


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"model_type": "gemma3"}, "model_type", "'gemma3'"),
        ({"model_type": ["llama"]}, "model_type", "['llama']"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act", "'gelu_pytorch_tanh'"),
        (QWEN2 | {"mlp_bias": True}, "mlp_bias", "True"),
        ({"mlp_bias": 1}, "mlp_bias", "1"),
        ({"attention_bias": "yes"}, "attention_bias", "'yes'"),
        (MISTRAL | {"attention_bias": True}, "attention_bias", "True"),
        (PHI3 | {"attention_bias": True}, "attention_bias", "True"),
        ({"sliding_window": 4096}, "sliding_window", "4096"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window", "0"),
        (MISTRAL | {"use_sliding_window": False}, "use_sliding_window", "False"),
        (MISTRAL | {"layer_types": ["full_attention"] * 30}, "layer_types", "full_attention"),
        (PHI3 | {"layer_types": ["sliding_attention"] * 30}, "layer_types", "sliding_attention"),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": "wide"}, "sliding_window", "'wide'"),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers", "-1"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 30}, "layer_types", "sliding_attention"),
        (QWEN2 | {"layer_types": ["full_attention"] * 29}, "layer_types", "full_attention"),
        (QWEN2 | {"layer_types": ["chunked_attention"] * 30}, "layer_types", "chunked_attention"),
        (QWEN3_MOE | {"use_sliding_window": True}, "use_sliding_window", "True"),
        (QWEN3_MOE | {"num_experts": 0}, "num_experts", "0"),
        (QWEN3_MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok", "9"),
        (QWEN3_MOE | {"num_experts_per_tok": "absent"}, "num_experts_per_tok", "None"),
        (QWEN3_MOE | {"moe_intermediate_size": "absent"}, "moe_intermediate_size", "None"),
        (QWEN3_MOE | {"norm_topk_prob": "maybe"}, "norm_topk_prob", "'maybe'"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step", "0"),
        (QWEN3_MOE | {"mlp_only_layers": [-1]}, "mlp_only_layers", "[-1]"),
        ({"num_experts": 8}, "num_experts", "8"),
        ({"num_local_experts": 8}, "num_local_experts", "8"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention", "True"),
        ({"add_cross_attention": True}, "add_cross_attention", "True"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping", "30.0"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "50.0"),
        (GEMMA2 | {"final_logit_softcapping": -1.0}, "final_logit_softcapping", "-1.0"),
        (GEMMA2 | {"query_pre_attn_scalar": "absent"}, "query_pre_attn_scalar", "None"),
        (GEMMA2 | {"head_dim": "absent"}, "head_dim", "None"),
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation", "'gelu'"),
        (GEMMA2 | {"hidden_act": "silu"}, "hidden_act", "'silu'"),
        (GEMMA2 | {"sliding_window": None}, "layer_types", "None"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention", "True"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern", "0"),
        (GEMMA3 | {"rope_local_base_freq": -1}, "rope_local_base_freq", "-1"),
        (
            GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
            "rope_parameters.sliding_attention.rope_type",
            "'linear'",
        ),
        (
            GEMMA3 | {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "rope_parameters.full_attention.rope_type",
            "'dynamic'",
        ),
        (PHI3 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor", "1.5"),
        (PHI3 | {"partial_rotary_factor": 0.52}, "partial_rotary_factor", "0.52"),
        (PHI3 | {"rope_scaling": {"type": "su"}}, "original_max_position_embeddings", "None"),
        (
            PHI3 | {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}, "original_max_position_embeddings": 9},
            "rope_scaling.short_factor",
            "[1.0]",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type", "'longrope'"),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "rope_scaling.mscale", "0.7"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "rope_scaling.truncate", "'no'"),
        ({"model_type": "gpt_oss"}, "model_type", "'gpt_oss'"),
        ({"compression_config": {"format": "dense"}}, "compression_config", "dense"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "sliding_attention"),
        ({"layer_types": 3}, "layer_types", "3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "gptq"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling.original_max_position_embeddings",
            "None",
        ),
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
