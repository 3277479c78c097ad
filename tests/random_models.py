"""Random models as transformers writes them, one for each family and each feature of a config; and its own answers.

transformers is imported where it is needed: most tests do without.
"""

from pathlib import Path
from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large enough that every part of the model shows in the logits
    "use_cache": False,
}


def save_random_model(
    folder: Path, family: str, max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **settings: Any
) -> Path:
    """Fill `folder` with a random model of `SHAPE` in safetensors; return it."""
    import transformers

    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **{**SHAPE, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide a mistake
                parameter.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def logits_of(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' fp32 logits, `[num_tokens, vocab_size]`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        result: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return result


def greedy(folder: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """transformers' next tokens, and how far its two best logits lie apart at each."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    token_ids, gaps = list(prompt), []
    for _ in range(count):
        with torch.no_grad():
            best = model(torch.tensor([token_ids])).logits[0, -1].topk(2)
        token_ids.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return token_ids[len(prompt) :], gaps


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
