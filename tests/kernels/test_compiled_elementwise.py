"""The memory-bound kernels as machine code: no spills, little shared memory, loads and stores of 16 bytes."""

import dataclasses
import re

import pytest

from baton.kernels.gpu import activation, block_copy, checksum, norm, rope_store
from baton.kernels.gpu.compiling import CAPABILITIES, SHARED_MEMORY_LIMIT, CompiledKernel, KernelSpec, compile_kernel
from baton.kernels.gpu.model_shapes import LLAMA_8B, MODEL_SHAPES, QWEN3_06B

MODULES = (norm, activation, rope_store, block_copy, checksum)
# What is not read by 16 bytes a thread: a token's slot, a piece's block ids, and a checksum's end of less than a tile.
NARROW = {"slots_ptr": {8}, "table_ptr": {4}, "words_ptr": {4, 16}, "bytes_ptr": {1}}
THREADS_PER_MULTIPROCESSOR, REGISTERS_PER_MULTIPROCESSOR = 2048, 65536


def specs() -> list[KernelSpec]:
    """Over all models, each once."""
    found: list[KernelSpec] = []
    for module in MODULES:
        for shape in MODEL_SHAPES:
            found += [spec for spec in module.kernel_specs(shape) if spec not in found]
    return found


def check(compiled: CompiledKernel) -> None:
    assert compiled.spill_bytes == 0
    assert compiled.shared_bytes <= min(4096, SHARED_MEMORY_LIMIT[compiled.capability])
    assert compiled.load_widths == {name: NARROW.get(name, {16}) for name in compiled.load_widths}
    assert any(16 in widths for widths in compiled.load_widths.values())
    if compiled.spec.function is not checksum._checksum:  # which writes one number a program
        stores = set(re.findall(r"st\.global[\w.]*", compiled.ptx))
        assert stores == {"st.global.v4.b32"}, "a narrow store"
    # Programs of a quarter of a multiprocessor's threads fit into its registers: 512 threads with two loads of 16 bytes
    # each are 16 KiB in flight, 2 MiB on an H200, which is what 4.8 TB/s need at 450 ns.
    threads = 32 * compiled.spec.num_warps
    assert REGISTERS_PER_MULTIPROCESSOR // (compiled.registers * threads) * threads >= THREADS_PER_MULTIPROCESSOR // 4


@pytest.mark.parametrize("spec", [module.kernel_specs(QWEN3_06B)[-1] for module in MODULES], ids=lambda spec: spec.name)
def test_on_an_h200(spec: KernelSpec) -> None:
    check(compile_kernel(spec, 90))


def test_gelu_on_an_h200() -> None:
    (spec,) = activation.kernel_specs(LLAMA_8B)
    check(compile_kernel(dataclasses.replace(spec, constants={**spec.constants, "IS_GELU": True}), 90))


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "spec", specs(), ids=lambda spec: f"{spec.name}-{spec.constants.get('HIDDEN', spec.constants.get('SIZE', ''))}"
)
def test_everywhere(spec: KernelSpec, capability: int) -> None:
    check(compile_kernel(spec, capability))


def test_what_is_proven_is_what_is_launched() -> None:
    """Each spec names every argument of its kernel; its constants come from the launcher's own configuration."""
    for spec in specs():
        assert {*spec.arguments} | {*spec.constants} == {*spec.function.arg_names}
    by_name = {spec.name: spec for module in MODULES for spec in module.kernel_specs(LLAMA_8B)}
    assert {*by_name} == {
        "rms norm", "add, rms norm", "silu and mul", "rope, store", "gather", "scatter", "checksum",
    }  # fmt: skip
    assert by_name["rope, store"].constants["HALF"] == 64
    assert not by_name["rope, store"].constants["HAS_NORM"]
    assert all(spec.is_memory_bound for spec in by_name.values())
