"""Definitions of the ops between the matrix products."""

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension (Zhang and Sennrich, 2019)."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place, rounded to its dtype, then `rms_norm` of it."""
    residual += x
    return rms_norm(residual, weight, eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[num_tokens, heads, D]` by `cos`, `sin` `[num_tokens, D / 2]` (Su et al., 2021).

    Element i of the first half pairs with element i of the second half, as Hugging Face stores the weights.
    """
    first, second = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`; `gate_up` is `[num_tokens, 2 * intermediate_size]`, gate first."""
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up`, gelu approximated by tanh (Hendrycks and Gimpel, 2016, section 2)."""
    gate, up = gate_up.chunk(2, -1)
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
