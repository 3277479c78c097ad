"""Definitions of the ops on the paged cache."""

from collections.abc import Sequence

import torch
from torch import Tensor


def store_kv(kv_layer: Tensor, key_value: Tensor, slot_mapping: Sequence[int]) -> None:
    """Write `key_value` `[num_tokens, 2, KVH, D]` into the token slots `block_id * block_size + offset`."""
    block_size = kv_layer.shape[3]
    for token, slot in enumerate(slot_mapping):
        kv_layer[slot // block_size, :, :, slot % block_size] = key_value[token]


def paged_attention(  # noqa: PLR0913 - what a layer says beside its tensors is by keyword
    query: Tensor,
    kv_layer: Tensor,
    cu_seqlens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of each query token over its own sequence; returns `[num_tokens, H, D]`.

    `query` is `[num_tokens, H, D]`; sequence s owns the tokens `cu_seqlens[s]` to `cu_seqlens[s + 1]`, which are the
    last ones of its `context_lens[s]` tokens. All keys and values are in the cache already. `scale` is D ** -0.5
    unless given. `window` > 0: a token sees itself and the `window - 1` tokens before it. `soft_cap` > 0: a score x
    becomes `soft_cap * tanh(x / soft_cap)` (Gemma 2, 2024).
    """
    scale = query.shape[2] ** -0.5 if scale is None else scale
    block_size, group = kv_layer.shape[3], query.shape[1] // kv_layer.shape[2]
    out = torch.empty_like(query)
    for s, table in enumerate(block_tables):
        first, last = cu_seqlens[s], cu_seqlens[s + 1]
        for token in range(first, last):
            visible = context_lens[s] - (last - 1 - token)
            oldest = max(0, visible - window) if window else 0
            slots = [(table[t // block_size], t % block_size) for t in range(oldest, visible)]
            kv = torch.stack([kv_layer[block, :, :, offset] for block, offset in slots], 2)
            key, value = kv.repeat_interleave(group, 1)  # each [H, visible, D]
            scores = (key * query[token].unsqueeze(1)).sum(-1) * scale
            scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
            out[token] = (scores.softmax(-1).unsqueeze(-1) * value).sum(1)
    return out
