"""The gated activation between the two products of a feed-forward layer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .cost import OpCost
from .launching import compile_options, require, require_tensor
from .model_shapes import ModelShape


@triton.jit
def _act_and_mul(  # type: ignore[no-untyped-def]
    gate_up_ptr,  # [N, 2 * SIZE], rows gate_up_stride apart
    out_ptr,  # [N, SIZE], rows out_stride apart
    gate_up_stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """One program a BLOCK of columns of one row."""
    pieces = tl.cdiv(SIZE, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    columns = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate_row = gate_up_ptr + row * gate_up_stride
    gate = tl.load(gate_row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_row + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    # gelu by tanh is gate * sigmoid(2 * inner), since (1 + tanh(x)) / 2 = sigmoid(2 * x)
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    decay = tl.exp(-tl.abs(inner))  # at most 1, so nothing overflows
    product = gate * tl.where(inner >= 0, 1.0, decay) / (1 + decay) * up
    tl.store(out_ptr + row * out_stride + columns, product.to(out_ptr.dtype.element_ty), mask=mask)


def activation_config(size: int) -> dict[str, int]:
    """BLOCK and num_warps for rows of `size` outputs: a thread reads 8 neighbours of either half, 16 bytes in bf16."""
    block = min(triton.next_power_of_2(size), 1024)
    return {"BLOCK": block, "num_warps": max(block // 256, 1)}


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """`reference.silu_and_mul` of `[N, 2 * I]`, in fp32, rounded once; returns `[N, I]`. Rows may lie apart."""
    return _launch(gate_up, out, is_gelu=False)


def gelu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """`reference.gelu_and_mul`, in the same way."""
    return _launch(gate_up, out, is_gelu=True)


def _launch(gate_up: Tensor, out: Tensor | None, *, is_gelu: bool) -> Tensor:
    require_tensor("gate_up", gate_up, (None, None), torch.float32, torch.float16, torch.bfloat16)
    num_rows, doubled = gate_up.shape
    require(doubled % 2 == 0, f"gate_up has {doubled} columns, an even number is needed")
    size = doubled // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    require_tensor("out", out, (num_rows, size), gate_up.dtype)
    for name, tensor in (("gate_up", gate_up), ("out", out)):
        require(tensor.stride(1) == 1, f"{name}'s last dimension is not contiguous")
    config = activation_config(size)
    num_programs = num_rows * triton.cdiv(size, config["BLOCK"])
    if num_programs > 0:
        _act_and_mul[(num_programs,)](
            gate_up,
            out,
            gate_up.stride(0),
            out.stride(0),
            SIZE=size,
            BLOCK=config["BLOCK"],
            IS_GELU=is_gelu,
            **compile_options(config["num_warps"], 1),
        )
    return out


def activation_cost(num_rows: int, size: int, item_size: int) -> OpCost:
    """Two halves read, one written; `size` is the number of outputs of a row."""
    return OpCost(3 * item_size * num_rows * size, 5 * num_rows * size)


def kernel_specs(shape: ModelShape) -> list[KernelSpec]:
    """The activation of a bfloat16 model; of an expert, in a mixture of experts."""
    size = shape.expert_intermediate_size or shape.intermediate_size
    config = activation_config(size)
    return [
        KernelSpec(
            name="silu and mul",
            function=_act_and_mul,
            arguments={"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "gate_up_stride": "i32", "out_stride": "i32"},
            constants={"SIZE": size, "BLOCK": config["BLOCK"], "IS_GELU": False},
            num_warps=config["num_warps"],
            num_stages=1,
            aligned=("gate_up_stride", "out_stride"),
            is_memory_bound=True,
        )
    ]
