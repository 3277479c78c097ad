"""What stands between the fused QKV projection and attention, in one pass: QK-norm, RoPE and the store to the cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .cost import OpCost
from .launching import compile_options, require, require_tensor
from .model_shapes import ModelShape


@triton.jit(do_not_specialize=["slots_ptr"])  # a view into what a step packs, at any multiple of 8 bytes
def _norm_rope_store(  # type: ignore[no-untyped-def]
    heads_ptr,  # [N, NUM_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]
    q_weight_ptr,  # [2 * HALF]
    k_weight_ptr,  # [2 * HALF]
    cos_ptr,  # [N, HALF]
    sin_ptr,  # [N, HALF]
    kv_ptr,  # [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, 2 * HALF]
    slots_ptr,  # [N]
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    kv_block_stride,
    kv_side_stride,
    kv_head_stride,
    kv_slot_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
):
    """One program TILE_HEADS neighbouring heads of one token, each as its two halves `[TILE_HEADS, TILE_HALF]`."""
    tiles = tl.cdiv(NUM_HEADS + 2 * NUM_KV_HEADS, TILE_HEADS)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    head = tl.program_id(0) % tiles * TILE_HEADS + tl.arange(0, TILE_HEADS)
    column = tl.arange(0, TILE_HALF)
    in_half = column < HALF
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half[None, :]
    is_query, is_value = (head < NUM_HEADS)[:, None], (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]

    source = heads_ptr + token * token_stride + head.to(tl.int64)[:, None] * head_stride + column[None, :]
    raw_first = tl.load(source, mask=mask, other=0.0)
    raw_second = tl.load(source + HALF, mask=mask, other=0.0)
    cos = tl.load(cos_ptr + token * cos_stride + column, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * sin_stride + column, mask=in_half, other=0.0)[None, :]
    slot = tl.load(slots_ptr + token)

    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        first *= scale * _qk_weight(q_weight_ptr, k_weight_ptr, column, in_half, is_query)
        second *= scale * _qk_weight(q_weight_ptr + HALF, k_weight_ptr + HALF, column, in_half, is_query)
    # Values go through as they are: a product with 1 and 0 would spread an infinity.
    new_first = tl.where(is_value, raw_first, (first * cos - second * sin).to(raw_first.dtype))
    new_second = tl.where(is_value, raw_second, (second * cos + first * sin).to(raw_second.dtype))

    tl.store(source, new_first, mask=mask & is_query)
    tl.store(source + HALF, new_second, mask=mask & is_query)
    side = (head >= NUM_HEADS + NUM_KV_HEADS).to(tl.int64)
    kv_row = side * kv_side_stride + (head - NUM_HEADS - side * NUM_KV_HEADS) * kv_head_stride
    target = kv_ptr + slot // BLOCK_SIZE * kv_block_stride + slot % BLOCK_SIZE * kv_slot_stride
    target = target + kv_row[:, None] + column[None, :]
    first_stored = tl.where(slot >= 0, NUM_HEADS, NUM_HEADS + 2 * NUM_KV_HEADS)
    stored = mask & (head >= first_stored)[:, None]
    tl.store(target, new_first, mask=stored)
    tl.store(target + HALF, new_second, mask=stored)


@triton.jit
def _qk_weight(q_weight_ptr, k_weight_ptr, column, in_half, is_query):  # type: ignore[no-untyped-def]
    q_weight = tl.load(q_weight_ptr + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
    k_weight = tl.load(k_weight_ptr + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query, q_weight, k_weight)


def rope_store_config(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """Tile and num_warps: 2048 elements, of which a thread of 128 has 8 neighbours (16 bytes in bf16) of either half.

    It does not depend on the number of tokens, or a token's bits would.
    """
    tile_half = triton.next_power_of_2(head_dim // 2)
    wanted = triton.next_power_of_2(num_heads + 2 * num_kv_heads)
    tile_heads = min(max(1024 // tile_half, 1), wanted)
    warps = min(max(tile_heads * tile_half // 256, 1), 4)
    return {"TILE_HEADS": tile_heads, "TILE_HALF": tile_half, "num_warps": warps}


def norm_rope_store(
    heads: Tensor,
    num_heads: int,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
) -> None:
    """`reference.norm_rope_store`: queries in place, keys and values into the cache, each rounded once.

    `heads` `[N, H + 2 * KVH, D]` is the fused projection (tokens may lie apart; its key and value part stays as it
    was), `cos` and `sin` `[N, D / 2]` fp32, `kv_layer` a strided view `[num_blocks, 2, KVH, block_size, D]` of `heads`'
    dtype, `slot_mapping` `[N]` int64. A slot below 0 marks padding, for which nothing is stored. The norm weights
    `[D]`, fp32 or of `heads`' dtype, are both given or both None.
    """
    _check(heads, num_heads, (q_norm_weight, k_norm_weight), (cos, sin), kv_layer, slot_mapping)
    num_tokens, total_heads, head_dim = heads.shape
    config = rope_store_config(num_heads, kv_layer.shape[2], head_dim)
    num_programs = num_tokens * triton.cdiv(total_heads, config["TILE_HEADS"])
    if num_programs == 0:
        return
    _norm_rope_store[(num_programs,)](
        heads,
        heads if q_norm_weight is None else q_norm_weight,  # never read without a norm
        heads if k_norm_weight is None else k_norm_weight,
        cos,
        sin,
        kv_layer,
        slot_mapping,
        heads.stride(0),
        heads.stride(1),
        cos.stride(0),
        sin.stride(0),
        *kv_layer.stride()[:4],
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_layer.shape[2],
        HALF=head_dim // 2,
        BLOCK_SIZE=kv_layer.shape[3],
        HAS_NORM=q_norm_weight is not None,
        TILE_HEADS=config["TILE_HEADS"],
        TILE_HALF=config["TILE_HALF"],
        **compile_options(config["num_warps"], 1),
    )


def _check(
    heads: Tensor,
    num_heads: int,
    weights: tuple[Tensor | None, Tensor | None],
    angles: tuple[Tensor, Tensor],
    kv_layer: Tensor,
    slot_mapping: Tensor,
) -> None:
    require_tensor("heads", heads, (None, None, None), torch.float32, torch.float16, torch.bfloat16)
    num_tokens, total_heads, head_dim = heads.shape
    num_kv_heads = (total_heads - num_heads) // 2
    require(
        0 < num_heads < total_heads and (total_heads - num_heads) % 2 == 0,
        f"{total_heads} heads cannot be num_heads={num_heads} query heads and as many key as value heads",
    )
    require(head_dim % 2 == 0, f"heads have {head_dim} elements, an even number is needed")
    require_tensor("kv_layer", kv_layer, (None, 2, num_kv_heads, None, head_dim), heads.dtype)
    require_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64)
    for name, tensor in zip(("cos", "sin"), angles, strict=True):
        require_tensor(name, tensor, (num_tokens, head_dim // 2), torch.float32)
        require(tensor.stride(1) == 1, f"{name}'s last dimension is not contiguous")
    require((weights[0] is None) == (weights[1] is None), "q_norm_weight and k_norm_weight come together")
    for name, weight in zip(("q_norm_weight", "k_norm_weight"), weights, strict=True):
        if weight is not None:
            require_tensor(name, weight, (head_dim,), torch.float32, heads.dtype)
            require(weight.is_contiguous(), f"{name} is not contiguous")
    require(heads.stride(2) == 1, "heads' last dimension is not contiguous")
    require(kv_layer.stride(4) == 1, "kv_layer's last dimension is not contiguous")
    require(slot_mapping.is_contiguous(), "slot_mapping is not contiguous")


def rope_store_cost(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, item_size: int) -> OpCost:
    """Every head read once and written once (queries in place, keys and values to the cache); cos, sin, slots."""
    elements = num_tokens * (num_heads + 2 * num_kv_heads) * head_dim
    return OpCost(2 * item_size * elements + num_tokens * (4 * head_dim + 8), 6 * elements)


def kernel_specs(shape: ModelShape, block_size: int = 16) -> list[KernelSpec]:
    """Norm (where the model has it), RoPE and store of a bfloat16 model with fp32 norm weights."""
    config = rope_store_config(shape.num_heads, shape.num_kv_heads, shape.head_dim)
    weight = "*fp32" if shape.qk_norm else "*bf16"
    pointers = {
        "heads_ptr": "*bf16", "q_weight_ptr": weight, "k_weight_ptr": weight, "cos_ptr": "*fp32", "sin_ptr": "*fp32",
        "kv_ptr": "*bf16", "slots_ptr": "*i64",
    }  # fmt: skip
    strides = (
        "token_stride", "head_stride", "cos_stride", "sin_stride",
        "kv_block_stride", "kv_side_stride", "kv_head_stride", "kv_slot_stride",
    )  # fmt: skip
    return [
        KernelSpec(
            name="qk-norm, rope, store" if shape.qk_norm else "rope, store",
            function=_norm_rope_store,
            arguments={**pointers, **dict.fromkeys(strides, "i32"), "eps": "fp32"},
            constants={
                "NUM_HEADS": shape.num_heads,
                "NUM_KV_HEADS": shape.num_kv_heads,
                "HALF": shape.head_dim // 2,
                "BLOCK_SIZE": block_size,
                "HAS_NORM": shape.qk_norm,
                "TILE_HEADS": config["TILE_HEADS"],
                "TILE_HALF": config["TILE_HALF"],
            },
            num_warps=config["num_warps"],
            num_stages=1,
            aligned=strides,
            is_memory_bound=True,
        )
    ]
