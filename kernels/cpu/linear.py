"""The matrix products of the CPU path: weights packed once, fp32 activations in, fp32 out.

"float16" keeps the weights in fp16, packed for FBGEMM, and accumulates in fp32: half the weight bytes, so a decode
step on few rows, which is bound by reading weights, is up to twice as fast (relative error 2e-4). "float32" is
torch's own matrix product. bf16 and torch's int4/int8 matmuls are slower than fp32 on AVX2, so they are not offered.
"""

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernel_set import Linear

LINEAR_DTYPES = ("float16", "float32")


@cache
def fp16_linear_available() -> bool:
    """Whether this build of torch has FBGEMM (x86-64 with AVX2); elsewhere "float16" runs as "float32"."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def pack_linear(weight: Tensor, bias: Tensor | None, dtype: str) -> Linear:
    """Make `y = x @ weight.T + bias` ready to run; `weight` is `[out_features, in_features]`, any float dtype."""
    if dtype not in LINEAR_DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(LINEAR_DTYPES)}")
    bias32 = None if bias is None else bias.float()
    if dtype == "float32" or not fp16_linear_available():
        return partial(F.linear, weight=weight.float(), bias=bias32)
    torch.backends.quantized.engine = "fbgemm"  # packing reads this process-wide setting; running does not
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias32)
    run = torch.ops.quantized.linear_dynamic_fp16.default

    def linear(x: Tensor) -> Tensor:
        result: Tensor = run(x, packed)
        return result

    return linear
