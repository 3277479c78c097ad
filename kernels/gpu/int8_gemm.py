"""Weight-only int8 products: half the bytes of bfloat16 are read, and each output channel is scaled at the end.

The kernel is that of gemm.py: a weight tile arrives as int8 in 16-byte pieces, becomes x's dtype in registers and is
multiplied by the same instructions, so a row has the same bits in any batch here too.
"""

import torch
from torch import Tensor

from .compiling import KernelSpec
from .cost import OpCost
from .gemm import dense_specs, launch_linear, linear_shapes, prepare_linear
from .launching import require, require_tensor
from .model_shapes import ModelShape


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values `[M, K]` and fp32 scales `[M]`; `reference.quantize_int8` is the rule. Plain torch, any device."""
    require_tensor("weight", weight, (None, None))
    scale = weight.abs().amax(1).float() / 127
    quotient = weight.float() / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    return quotient.round_().clamp_(-127, 127).to(torch.int8), scale


def int8_linear(
    x: Tensor,
    weight_int8: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`(x @ weight_int8.T) * scale + bias`, `[N, M]`; each row has the same bits whatever N is and wherever it lies.

    `x` is `[N, K]` in a float dtype with any row stride, `weight_int8` `[M, K]` contiguous, `scale` `[M]` fp32. The
    integers are exact in x's dtype; sums are in fp32 and rounded once, to `out_dtype` (default: x's). Raises
    ValueError for what does not fit.
    """
    require(weight_int8.dtype == torch.int8, f"weight_int8 is {weight_int8.dtype}")
    require_tensor("scale", scale, (weight_int8.shape[0],), torch.float32)
    require(scale.is_contiguous() and scale.device == x.device, "scale must be contiguous and on x's device")
    return launch_linear(x, weight_int8, scale, bias, prepare_linear(x, weight_int8, bias, out_dtype, out))


def int8_linear_cost(num_rows: int, in_features: int, out_features: int, item_size: int = 2) -> OpCost:
    """Weight (a byte each, and the scales), input and output each once; `item_size` of the activations."""
    num_bytes = in_features * out_features + 4 * out_features + num_rows * (in_features + out_features) * item_size
    return OpCost(num_bytes, 2 * num_rows * in_features * out_features)


def kernel_specs(shape: ModelShape, capability: int = 90) -> list[KernelSpec]:
    """Every launch of a model's dense products with bfloat16 activations, but lm_head's, which is not quantised."""
    names = [name for name in linear_shapes(shape) if name != "lm_head"]
    return dense_specs(names, shape, capability, is_int8=True)
