"""The small ops between the matrix products, with as few passes and temporaries as eager torch allows."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension; see `reference.rms_norm`."""
    return F.rms_norm(x, weight.shape, weight, eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `x` `[num_tokens, heads, D]` in place (it may be a strided view); see `reference.apply_rope`.

    `cos` and `sin` are `[num_tokens, 1, D / 2]`, made once per forward pass.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    first_sin, second_sin = first * sin, second * sin
    first.mul_(cos).sub_(second_sin)
    second.mul_(cos).add_(first_sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[num_tokens, 2 * intermediate_size]`; see `reference.silu_and_mul`."""
    half = gate_up.shape[-1] // 2
    return F.silu(gate_up[:, :half]).mul_(gate_up[:, half:])


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of `[num_tokens, 2 * intermediate_size]`; see `reference.gelu_and_mul`."""
    half = gate_up.shape[-1] // 2
    return F.gelu(gate_up[:, :half], approximate="tanh").mul_(gate_up[:, half:])
