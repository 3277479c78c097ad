"""What each family and each feature of a config is tested with: model type and changes of `SHAPE` (conftest.py)."""

from typing import Any


def rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **settings}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(4)],
    "long_factor": [2.0 + i for i in range(4)],
    "original_max_position_embeddings": 128,
}
PHI3 = {"pad_token_id": 0, "eos_token_id": 2}
GEMMA = {"query_pre_attn_scalar": 24, "num_hidden_layers": 4}  # 24: not head_dim
MIXED_WINDOWS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama without grouped heads": ("llama", {"num_key_value_heads": 6}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama other theta": ("llama", rope(rope_type="default", rope_theta=500.0)),
    "llama other eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama linear rope": ("llama", rope(rope_type="linear", factor=4.0)),
    "llama 3.1 rope": ("llama", rope(rope_type="llama3", **LLAMA3)),
    "llama yarn": ("llama", rope(**YARN)),
    "qwen2 yarn not truncated": ("qwen2", rope(**YARN, truncate=False, beta_fast=20.0, attention_factor=1.3)),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 19}),
    "mistral window of one": ("mistral", {"sliding_window": 1}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral window": ("mixtral", {"num_local_experts": 4, "sliding_window": 23, "num_experts_per_tok": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2 window": (
        "qwen2",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3 window": (
        "qwen3",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 33, "layer_types": MIXED_WINDOWS},
    ),
    "qwen3_moe": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe not renormalised": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe some layers": (
        "qwen3_moe",
        {**QWEN3_MOE, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "gemma2": ("gemma2", {**GEMMA, "sliding_window": 21}),
    "gemma2 small caps": (
        "gemma2",
        {**GEMMA, "sliding_window": 9, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "gemma2 without caps": (
        "gemma2",
        {**GEMMA, "sliding_window": 500, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2 untied, with biases": ("gemma2", {**GEMMA, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7, "sliding_window": 17}),
    "gemma3 other order": (
        "gemma3_text",
        {
            **GEMMA,
            "sliding_window": 12,
            "layer_types": MIXED_WINDOWS,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "phi3": ("phi3", PHI3),
    "phi3 window": ("phi3", {**PHI3, "sliding_window": 31}),
    "phi3 partial rotation": ("phi3", {**PHI3, **rope(rope_type="default", partial_rotary_factor=0.75)}),
    "phi3 longrope": ("phi3", {**PHI3, **rope(**LONGROPE), "original_max_position_embeddings": 128, "head_dim": 8}),
}
