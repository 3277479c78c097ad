"""Attention kernels as machine code: no spills, shared memory within the chip, tensor cores, 16-byte loads."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from baton.kernels.gpu import decode_attention, prefill_attention
from baton.kernels.gpu.compiling import CAPABILITIES, SHARED_MEMORY_LIMIT, KernelSpec, compile_kernel
from baton.kernels.gpu.model_shapes import LLAMA_8B, MODEL_SHAPES

VARIANTS = [{"window": 4096}, {"soft_cap": 50.0}, {"window": 4096, "soft_cap": 50.0}, {"block_size": 1}]
GEMMA_2_9B = dataclasses.replace(LLAMA_8B, name="Gemma-2-9B", num_heads=16, num_kv_heads=8, head_dim=256)


def specs_of(capability: int) -> list[KernelSpec]:
    """Every launch of the models, and on sm_90 of the variants, each machine code once."""
    found: dict[str, KernelSpec] = {}
    for make in (decode_attention.kernel_specs, prefill_attention.kernel_specs):
        specs = [spec for shape in MODEL_SHAPES for spec in make(shape, capability)]
        if capability == 90:
            specs += [spec for variant in VARIANTS for spec in make(LLAMA_8B, capability, **variant)]
            specs += make(GEMMA_2_9B, capability, window=4096, soft_cap=50.0)
        found |= {f"{spec.name} {spec.constants}": spec for spec in specs}
    return list(found.values())


def check(spec: KernelSpec, capability: int) -> None:
    kernel = compile_kernel(spec, capability)
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= SHARED_MEMORY_LIMIT[capability]
    if spec.uses_tensor_cores:
        tile = spec.constants.get("ROW_TILE", 16)
        assert kernel.uses_tensor_cores if tile >= 64 else kernel.uses_any_tensor_core
    assert kernel.has_wide_loads


@pytest.mark.parametrize("make", [decode_attention.kernel_specs, prefill_attention.kernel_specs])
def test_llama_on_hopper(make: Callable[..., list[KernelSpec]]) -> None:
    for spec in make(LLAMA_8B, 90):
        check(spec, 90)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_model_and_variant(capability: int) -> None:
    for spec in specs_of(capability):
        check(spec, capability)


def test_four_decode_programs_share_a_multiprocessor() -> None:
    """What hides one program's waits behind the others' loads: registers and shared memory of four fit."""
    spec = decode_attention.kernel_specs(LLAMA_8B, 90)[0]
    kernel = compile_kernel(spec, 90)
    assert 4 * spec.num_warps * 32 * kernel.registers <= 65536
    assert 4 * (kernel.shared_bytes + 1024) <= 228 * 1024


def test_prefill_overlaps_products_with_exponentials() -> None:
    """Its loop is software pipelined on sm_90: copies are two tiles ahead and wgmma is waited for late."""
    ptx = compile_kernel(prefill_attention.kernel_specs(LLAMA_8B, 90)[0], 90).ptx
    assert "cp.async.wait_group \t2" in ptx
    assert ptx.count("wgmma.mma_async") > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_compile(dtype: torch.dtype) -> None:
    for make in (decode_attention.kernel_specs, prefill_attention.kernel_specs):
        kernel = compile_kernel(make(LLAMA_8B, 90, dtype=dtype)[0], 90)
        assert kernel.spill_bytes == 0
