"""Definitions of the matrix products: dense, weight-only int8, and mixtures of experts."""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for `x` `[N, K]` and `weight` `[M, K]`: products and sums in fp32, nothing rounded."""
    product = x.float() @ weight.float().T
    return product if bias is None else product + bias.float()


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Per output channel, symmetric: `scale = max|w| / 127` and `round(w / scale)`, ties to even, for `[M, K]`.

    Everything is in fp32. -128 is never used; a row of zeros has scale 0 and values 0.
    """
    weight = weight.float()
    scale = weight.abs().amax(1) / 127
    quotient = weight / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    return quotient.round().clamp(-127, 127).to(torch.int8), scale


def int8_linear(x: Tensor, weight_int8: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`(x @ weight_int8.T) * scale + bias` in fp32, `scale` `[M]`."""
    product = (x.float() @ weight_int8.float().T) * scale
    return product if bias is None else product + bias.float()


def route_experts(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights (fp32) and ids (int32), each `[N, top_k]`, best first: softmax over all experts, then the top k.

    Equal probabilities go to the lower id. `renormalize` divides a token's weights by their sum (Qwen3-MoE's
    `norm_topk_prob`). `router_logits` is `[N, num_experts]`.
    """
    probabilities = router_logits.float().softmax(-1)
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, ids = ordered[:, :top_k], ids[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.int()


def moe_forward(
    x: Tensor,
    router_logits: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    top_k: int,
    renormalize: bool,
) -> Tensor:
    """The weighted sum of a token's `top_k` experts, `down(silu(gate) * up)`, in fp32; `[N, hidden]`.

    `gate_up_weights` is `[E, 2 * I, hidden]`, gate rows first, and `down_weights` `[E, hidden, I]`.
    """
    weights, ids = route_experts(router_logits, top_k, renormalize)
    out = torch.zeros(x.shape[0], down_weights.shape[1])
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = linear(x[token : token + 1], gate_up_weights[expert]).chunk(2, -1)
            activated = gate / (1 + torch.exp(-gate)) * up
            out[token] += weight * linear(activated, down_weights[expert])[0]
    return out
