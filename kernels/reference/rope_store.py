"""Definition of what stands between the fused QKV projection and attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention import store_kv
from .elementwise import apply_rope, rms_norm


def norm_rope_store(  # noqa: PLR0913 (what the fused op takes)
    heads: Tensor,
    num_heads: int,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv_layer: Tensor,
    slot_mapping: Sequence[int],
) -> None:
    """Norm (where weights `[D]` are given) and rotate queries and keys; queries in place, keys and values to the cache.

    `heads` is `[N, H + 2 * KVH, D]`: queries, keys, values. Nothing is stored for a token whose slot is below 0.
    """
    query, key, value = heads.tensor_split((num_heads, (num_heads + heads.shape[1]) // 2), 1)
    if q_norm_weight is not None and k_norm_weight is not None:
        query, key = rms_norm(query, q_norm_weight, eps), rms_norm(key, k_norm_weight, eps)
    key_value = torch.stack((apply_rope(key, cos, sin), value), 1)
    heads[:, :num_heads] = apply_rope(query, cos, sin)
    for token, slot in enumerate(slot_mapping):
        if slot >= 0:
            store_kv(kv_layer, key_value[token : token + 1], [slot])
