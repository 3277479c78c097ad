"""What a device computes. Every op has one plain definition in `reference/`; here is the CPU path, in `gpu/` Triton."""

from .attention import AttentionPlan, paged_attention, plan_attention, store_kv
from .elementwise import apply_rope, rms_norm, silu_and_mul
from .linear import LINEAR_DTYPES, Linear, fp16_linear_available, pack_linear

__all__ = [
    "LINEAR_DTYPES",
    "AttentionPlan",
    "Linear",
    "apply_rope",
    "fp16_linear_available",
    "pack_linear",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "silu_and_mul",
    "store_kv",
]
