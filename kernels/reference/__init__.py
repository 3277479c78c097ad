"""The definition of every op, written to be read: plain torch, no reuse of memory, loops where they are clearer.

The ops that run are checked against these. Shapes: H query heads, KVH key/value heads (H is a multiple of KVH; query
head h reads key head h // (H // KVH)), D head_dim; `kv_layer` is `[num_blocks, 2, KVH, block_size, D]`.
"""

from .attention import paged_attention, store_kv
from .block_copy import gather_tokens, scatter_tokens
from .checksum import checksum
from .elementwise import add_rms_norm, apply_rope, gelu_and_mul, rms_norm, silu_and_mul
from .feedback import resolve_feedback
from .gemm import int8_linear, linear, moe_forward, quantize_int8, route_experts
from .rope_store import norm_rope_store
from .sampling import SamplingRule, apply_penalties, kept_tokens, sample

__all__ = [
    "SamplingRule",
    "add_rms_norm",
    "apply_penalties",
    "apply_rope",
    "checksum",
    "gather_tokens",
    "gelu_and_mul",
    "int8_linear",
    "kept_tokens",
    "linear",
    "moe_forward",
    "norm_rope_store",
    "paged_attention",
    "quantize_int8",
    "resolve_feedback",
    "rms_norm",
    "route_experts",
    "sample",
    "scatter_tokens",
    "silu_and_mul",
    "store_kv",
]
