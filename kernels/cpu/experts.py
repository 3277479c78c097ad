"""A mixture of experts on the CPU: the tokens of one expert at a time, in one product of full size."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..kernel_set import Experts, Linear
from .elementwise import silu_and_mul
from .linear import pack_linear


def pack_experts(weights: Iterable[tuple[Tensor, Tensor]], top_k: int, *, renormalize: bool, dtype: str) -> Experts:
    """Make `reference.moe_forward` ready to run; of each expert `[2 * I, hidden]`, gate first, and `[hidden, I]`."""
    packed = [(pack_linear(gate_up, None, dtype), pack_linear(down, None, dtype)) for gate_up, down in weights]

    def experts(x: Tensor, router_logits: Tensor) -> Tensor:
        return _forward(x, router_logits, packed, top_k, renormalize)

    return experts


def _forward(
    x: Tensor, router_logits: Tensor, packed: list[tuple[Linear, Linear]], top_k: int, renormalize: bool
) -> Tensor:
    weights, ids = router_logits.softmax(-1).sort(dim=-1, descending=True, stable=True)  # equal ones: lower id first
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    chosen, order = ids.reshape(-1).sort(stable=True)  # pairs of token and choice, those of one expert together
    out = torch.zeros_like(x)
    used, counts = torch.unique_consecutive(chosen, return_counts=True)
    for expert, pairs in zip(used.tolist(), torch.split(order, counts.tolist()), strict=True):
        gate_up, down = packed[expert]
        tokens = pairs // top_k
        out.index_add_(0, tokens, down(silu_and_mul(gate_up(x[tokens]))) * weights.reshape(-1)[pairs].unsqueeze(1))
    return out
