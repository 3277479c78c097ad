"""What both attention kernels share: the walk over sequences, one step of online softmax, and the launchers' checks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import require, require_tensor

# Sequences one launch may hold. One number for every batch, so that every batch runs the same machine code.
MAX_SEQUENCES = 1024
LOG2_E = 1.4426950408889634
TRITON_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@triton.jit
def find_owner(ends, item, MAX_SEQUENCES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence that owns work item `item`, and its first item; `ends` is the running sum of items a sequence.

    One maximum finds both: of the sequences that end at or before the item, the last one and where it ends.
    """
    sequence = tl.arange(0, MAX_SEQUENCES)
    packed = ends.to(tl.int64) * (2 * MAX_SEQUENCES) + sequence + 1
    found = tl.max(tl.where(ends <= item, packed, 0), 0)
    return (found % (2 * MAX_SEQUENCES)).to(tl.int32), (found // (2 * MAX_SEQUENCES)).to(tl.int32)


@triton.jit
def cap_scores(scores, log2_scale, soft_cap):  # type: ignore[no-untyped-def]
    """`soft_cap * tanh(scores * scale / soft_cap)` in units of log2; `log2_scale` is scale * log2(e).

    tanh(x) = 1 - 2 / (exp(2 x) + 1); the exponential may overflow, and the result is then 1.
    """
    doubled = tl.exp2(scores * (2 * log2_scale / soft_cap))
    return soft_cap * 1.4426950408889634 * (1 - 2 / (doubled + 1))


@triton.jit
def softmax_step(  # type: ignore[no-untyped-def]
    scores, peak, total, log2_scale,
    MAY_BE_EMPTY: tl.constexpr,
):  # fmt: skip
    """Weights of one tile of `scores` (-inf: not visible) relative to the new peak, the factor by which older results
    shrink, the new peak and the new total (Milakov and Gimelshein, 2018). A fused multiply-add is spelt out so that
    masked and unmasked loops round alike. MAY_BE_EMPTY: rows may have seen no token yet.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * log2_scale)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MAY_BE_EMPTY else new_peak
    weights = tl.exp2(tl.fma(scores, log2_scale + tl.zeros_like(scores), tl.zeros_like(scores) - base[:, None]))
    shrink = tl.exp2(peak - base)
    return weights, shrink, new_peak, total * shrink + tl.sum(weights, 1)


def can_attend(head_dim: int) -> bool:
    """Whether the kernels have tiles for heads of this size."""
    return 16 <= head_dim <= 256 and head_dim % 8 == 0


def padded_head_dim(head_dim: int) -> int:
    """The width of a tile that holds one head."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def check_attention(query: Tensor, kv_layer: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float) -> None:
    """Raises ValueError unless the arguments that both launchers take fit each other."""
    require_tensor("query", query, (None, None, None), *TRITON_TYPES)
    num_heads, head_dim = query.shape[1:]
    require(can_attend(head_dim), f"query has heads of {head_dim}, 16 to 256 in steps of 8 is needed")
    require_tensor("kv_layer", kv_layer, (None, 2, None, None, head_dim), query.dtype)
    num_kv_heads, block_size = kv_layer.shape[2:4]
    require(num_heads % num_kv_heads == 0, f"query has {num_heads} heads, no multiple of {num_kv_heads} KV heads")
    require(
        1 <= block_size <= 128 and block_size & (block_size - 1) == 0,
        f"kv_layer has blocks of {block_size} tokens, a power of two from 1 to 128 is needed",
    )
    inner = (num_kv_heads * block_size * head_dim, block_size * head_dim, head_dim, 1)
    require(kv_layer.stride()[1:] == inner, f"kv_layer has strides {kv_layer.stride()}, only the first may be free")
    require(query.stride()[1:] == (head_dim, 1), f"query has strides {query.stride()}, only the first may be free")
    require_tensor("context_lens", context_lens, (None,), torch.int32)
    require_tensor("block_tables", block_tables, (context_lens.shape[0], None), torch.int32)
    require(
        context_lens.shape[0] <= MAX_SEQUENCES, f"context_lens has {context_lens.shape[0]} rows, over {MAX_SEQUENCES}"
    )
    require(context_lens.is_contiguous(), "context_lens is not contiguous")
    require(block_tables.shape[1] == 1 or block_tables.stride(1) == 1, "block_tables has rows that are not contiguous")
    require(scale > 0, f"scale is {scale}, a positive number is needed")


def attention_output(query: Tensor, out: Tensor | None) -> Tensor:
    """`out` checked, or a new tensor `[rows, H, D]`."""
    if out is None:
        return torch.empty(query.shape, dtype=query.dtype, device=query.device)
    require_tensor("out", out, tuple(query.shape), query.dtype)
    require(out.is_contiguous(), "out is not contiguous")
    return out
