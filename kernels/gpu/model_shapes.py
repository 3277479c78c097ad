"""The models whose shapes every kernel is compiled, proven and measured for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes as a Hugging Face config.json names them; `num_experts` 0: a dense model."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    qk_norm: bool
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0


LLAMA_8B = ModelShape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, 128256, qk_norm=False)
QWEN3_06B = ModelShape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151936, qk_norm=True)
QWEN3_30B_A3B = ModelShape(
    "Qwen3-30B-A3B",
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    qk_norm=True,
    num_experts=128,
    experts_per_token=8,
    expert_intermediate_size=768,
)
MODEL_SHAPES = (LLAMA_8B, QWEN3_06B, QWEN3_30B_A3B)

# The default model, which runs on the CPU: measured there, not among the shapes that kernels are tuned for.
SMOLLM2_135M = ModelShape("SmolLM2-135M", 576, 1536, 30, 9, 3, 64, 49152, qk_norm=False)
