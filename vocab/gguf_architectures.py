"""What llama.cpp calls the tensors of each architecture, and what it changed in them when it made the file."""

from dataclasses import dataclass

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORM = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """`model_type` and `class_name` are Hugging Face's; `layer` maps names of one layer, GGUF's to Hugging Face's.

    `experts` does the same for tensors that hold all experts of a layer, `{}` standing for the expert's number.
    `has_biases`: q, k and v have. `is_permuted`: rows of q and k lie in another order. `norm_offset`: what was added to
    the weights of norms.
    """

    model_type: str
    class_name: str
    layer: dict[str, str]
    experts: dict[str, str] | None = None
    has_biases: bool = False
    is_permuted: bool = False
    norm_offset: float = 0.0


LLAMA = Architecture("llama", "LlamaForCausalLM", _ATTENTION | _PRE_NORM | _MLP, is_permuted=True)
MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    _ATTENTION | _PRE_NORM | {"ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    is_permuted=True,
)
ARCHITECTURES = {
    "llama": LLAMA,  # MIXTRAL, if it has experts
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _ATTENTION | _PRE_NORM | _MLP, has_biases=True),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _ATTENTION | _QK_NORM | _PRE_NORM | _MLP),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _ATTENTION | _FOUR_NORMS | _MLP, norm_offset=1.0),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _ATTENTION | _QK_NORM | _FOUR_NORMS | _MLP, norm_offset=1.0
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _FUSED | _PRE_NORM),
}
