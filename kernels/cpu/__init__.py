"""The CPU path: plain torch, shaped by what costs time on a few cores."""

from .attention import AttentionPlan, paged_attention, plan_attention, store_kv
from .elementwise import apply_rope, gelu_and_mul, rms_norm, silu_and_mul
from .experts import pack_experts
from .feedback import resolve_feedback
from .kernels import CpuKernels
from .linear import LINEAR_DTYPES, fp16_linear_available, pack_linear
from .logits import add_bias, apply_penalties, keep_allowed, token_logprobs

__all__ = [
    "LINEAR_DTYPES",
    "AttentionPlan",
    "CpuKernels",
    "add_bias",
    "apply_penalties",
    "apply_rope",
    "fp16_linear_available",
    "gelu_and_mul",
    "keep_allowed",
    "pack_experts",
    "pack_linear",
    "paged_attention",
    "plan_attention",
    "resolve_feedback",
    "rms_norm",
    "silu_and_mul",
    "store_kv",
    "token_logprobs",
]
