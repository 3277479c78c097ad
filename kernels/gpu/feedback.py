"""Tokens of the step before, read where the sampler left them: one launch at the head of each decode step."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .cost import OpCost
from .launching import compile_options, require, require_tensor
from .model_shapes import ModelShape

_BLOCK = 256
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _resolve_feedback(  # type: ignore[no-untyped-def]
    input_ids_ptr,  # [num_rows and more] int64
    feedback_slots_ptr,  # [num_rows] int64
    feedback_ptr,  # [num_slots] int64
    num_rows,
    num_slots,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(feedback_slots_ptr + rows, mask=rows < num_rows, other=-1)
    is_fed = (slots >= 0) & (slots < num_slots)
    tokens = tl.load(feedback_ptr + slots, mask=is_fed, other=0)
    tl.store(input_ids_ptr + rows, tl.maximum(tokens, 0), mask=is_fed)


def resolve_feedback(input_ids: Tensor, feedback_slots: Tensor, feedback: Tensor) -> None:
    """`reference.resolve_feedback`: `input_ids` `[N]`, `feedback_slots` `[n]` with n <= N, `feedback` `[slots]`,
    all int64 and contiguous. Slots outside of `feedback` are passed over. Safe in a CUDA graph."""
    for name, tensor in (("input_ids", input_ids), ("feedback_slots", feedback_slots), ("feedback", feedback)):
        require_tensor(name, tensor, (None,), torch.int64)
        require(tensor.is_contiguous(), f"{name} is not contiguous")
    num_rows = len(feedback_slots)
    require(num_rows <= len(input_ids), f"feedback_slots has {num_rows} rows, input_ids only {len(input_ids)}")
    if num_rows > 0:
        _resolve_feedback[(triton.cdiv(num_rows, _BLOCK),)](
            input_ids,
            feedback_slots,
            feedback,
            num_rows,
            len(feedback),
            BLOCK=_BLOCK,
            **compile_options(_NUM_WARPS, 1),
        )


def feedback_cost(num_rows: int) -> OpCost:
    """Of each row its slot, the token there and the id it becomes, 8 bytes each."""
    return OpCost(num_rows * 3 * 8, 0)


def kernel_specs(shape: ModelShape) -> list[KernelSpec]:
    """The same for every model."""
    return [
        KernelSpec(
            name="token feedback",
            function=_resolve_feedback,
            arguments={
                "input_ids_ptr": "*i64",
                "feedback_slots_ptr": "*i64",
                "feedback_ptr": "*i64",
                "num_rows": "i32",
                "num_slots": "i32",
            },
            constants={"BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            num_stages=1,
        )
    ]
