"""RMSNorm, alone and fused with the addition of the residual stream before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .cost import OpCost
from .launching import compile_options, require, require_tensor
from .model_shapes import ModelShape

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_BLOCK = 16384  # a longer row is read twice


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x_ptr,  # [N, HIDDEN], rows x_stride apart
    residual_ptr,  # [N, HIDDEN], rows residual_stride apart; read and written where HAS_RESIDUAL
    weight_ptr,  # [HIDDEN]
    out_ptr,  # [N, HIDDEN], rows out_stride apart
    x_stride,
    residual_stride,
    out_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program a row. What a row's sum is made of, and in which order, depends on constants only."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x_row = x_ptr + row * x_stride
    out_row = out_ptr + row * out_stride
    residual_row = residual_ptr + row * residual_stride
    if BLOCK >= HIDDEN:  # the row stays in registers
        mask = columns < HIDDEN
        x = _load_sum(x_row, residual_row, columns, mask, HAS_RESIDUAL)
        # asked for before the sum, which ends in a barrier: one latency less
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
        tl.store(out_row + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, HIDDEN, BLOCK):
            x = _load_sum(x_row, residual_row, start + columns, start + columns < HIDDEN, HAS_RESIDUAL)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 0) / HIDDEN + eps)
        source = residual_row if HAS_RESIDUAL else x_row
        for start in range(0, HIDDEN, BLOCK):
            mask = start + columns < HIDDEN
            x = tl.load(source + start + columns, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_row + start + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_sum(x_row, residual_row, columns, mask, HAS_RESIDUAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """`x`, or `x + residual` rounded to the residual's dtype (and written there), as fp32."""
    x = tl.load(x_row + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_row + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = (x + residual).to(residual_row.dtype.element_ty)
        tl.store(residual_row + columns, rounded, mask=mask)
        x = rounded.to(tl.float32)
    return x


def norm_config(hidden_size: int) -> dict[str, int]:
    """BLOCK and num_warps for rows of `hidden_size`: two 16-byte loads a thread where a row has enough elements.

    It does not depend on the number of rows, or a row's bits would. (They do depend on whether `x` starts at a multiple
    of 16 bytes, which chooses the width of the loads: rows of a whole tensor do, or never do.)
    """
    block = min(triton.next_power_of_2(hidden_size), _MAX_BLOCK)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """`reference.rms_norm` of each row of `x` `[N, hidden]`, in fp32, rounded once to `x`'s dtype.

    `weight` is `[hidden]`, fp32 or of `x`'s dtype. Rows of `x` and `out` may lie apart; `out` may be `x`.
    """
    return _launch(x, None, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """`residual += x` in place, rounded to its dtype, then `rms_norm(residual)`, in one pass; `out` may be `x`."""
    require_tensor("residual", residual, tuple(x.shape), x.dtype)
    require(residual.stride(-1) == 1, "residual's last dimension is not contiguous")
    return _launch(x, residual, weight, eps, out)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    require_tensor("x", x, (None, None), *_DTYPES)
    num_rows, hidden = x.shape
    require_tensor("weight", weight, (hidden,), torch.float32, x.dtype)
    out = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device) if out is None else out
    require_tensor("out", out, (num_rows, hidden), x.dtype)
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        require(tensor.stride(-1) == 1, f"{name}'s last dimension is not contiguous")
    added = x if residual is None else residual  # never touched unless HAS_RESIDUAL
    config = norm_config(hidden)
    if num_rows > 0:
        _rms_norm[(num_rows,)](
            x,
            added,
            weight,
            out,
            x.stride(0),
            added.stride(0),
            out.stride(0),
            eps,
            HIDDEN=hidden,
            BLOCK=config["BLOCK"],
            HAS_RESIDUAL=residual is not None,
            **compile_options(config["num_warps"], 1),
        )
    return out


def norm_cost(num_rows: int, hidden_size: int, item_size: int, has_residual: bool) -> OpCost:
    """Each row read and written once, two of them with a residual; the weight once."""
    passes = 4 if has_residual else 2
    flops = (5 if has_residual else 4) * num_rows * hidden_size
    return OpCost(item_size * hidden_size * passes * num_rows + 4 * hidden_size, flops)


def kernel_specs(shape: ModelShape) -> list[KernelSpec]:
    """The norms of a bfloat16 model with fp32 norm weights."""
    config = norm_config(shape.hidden_size)
    pointers = {"x_ptr": "*bf16", "residual_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*bf16"}
    strides = {"x_stride": "i32", "residual_stride": "i32", "out_stride": "i32"}
    return [
        KernelSpec(
            name=name,
            function=_rms_norm,
            arguments={**pointers, **strides, "eps": "fp32"},
            constants={"HIDDEN": shape.hidden_size, "BLOCK": config["BLOCK"], "HAS_RESIDUAL": has_residual},
            num_warps=config["num_warps"],
            num_stages=1,
            aligned=tuple(strides),
            is_memory_bound=True,
        )
        for name, has_residual in (("rms norm", False), ("add, rms norm", True))
    ]
