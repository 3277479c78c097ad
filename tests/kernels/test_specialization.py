"""Triton compiles a kernel anew for an integer that is 1, or a multiple of 16, unless it is told not to.

A size that changes from step to step must not be looked at, or a request would wait for the compiler in the middle of
serving: which sizes will come is not known when a worker starts.
"""

from baton.kernels.gpu import (
    activation,
    block_copy,
    checksum,
    decode_attention,
    feedback,
    gemm,
    grouped_gemm,
    int8_gemm,
    logprobs,
    norm,
    penalties,
    prefill_attention,
    rope_store,
    sampling,
)
from baton.kernels.gpu.compiling import KernelSpec
from baton.kernels.gpu.model_shapes import LLAMA_8B, QWEN3_30B_A3B

# Integers that a model fixes: its sizes, and the strides of tensors whose rows are as long in every step.
FIXED = {
    "K", "M", "block_stride", "cos_stride", "gate_up_stride", "head_stride", "kv_block_stride", "kv_head_stride",
    "kv_side_stride", "kv_slot_stride", "logits_stride", "num_experts", "num_groups", "num_pieces", "num_slots",
    "num_words", "out_stride", "query_stride", "residual_stride", "segment_steps", "sin_stride", "size",
    "strand_length", "token_stride", "vocab_size", "x_stride",
}  # fmt: skip


def all_specs() -> list[KernelSpec]:
    specs: list[KernelSpec] = []
    for shape in (LLAMA_8B, QWEN3_30B_A3B):
        for of_shape in (activation, block_copy, checksum, feedback, logprobs, norm, penalties, rope_store, sampling):
            specs += of_shape.kernel_specs(shape)
        for of_device in (decode_attention, gemm, grouped_gemm, int8_gemm, prefill_attention):
            specs += of_device.kernel_specs(shape, 90)
    return specs


def test_no_kernel_is_compiled_for_a_size_that_changes_from_step_to_step() -> None:
    specialized = {
        f"{spec.function.__name__}({parameter.name})"
        for spec in all_specs()
        for parameter in spec.function.params
        if spec.arguments.get(parameter.name) in ("i32", "i64")
        and parameter.name not in FIXED
        and not parameter.do_not_specialize
    }
    assert not specialized
