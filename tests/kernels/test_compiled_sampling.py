"""Sampling kernels as machine code: no spills, bounded shared memory, wide reads of the logits."""

import re

import pytest

from baton.kernels.gpu import logprobs, penalties, sampling
from baton.kernels.gpu.compiling import CAPABILITIES, SHARED_MEMORY_LIMIT, CompiledKernel, KernelSpec, compile_kernel
from baton.kernels.gpu.model_shapes import LLAMA_8B, MODEL_SHAPES, QWEN3_06B


def all_specs() -> list[KernelSpec]:
    """Those of every model, each once."""
    specs: dict[str, KernelSpec] = {}
    for shape in MODEL_SHAPES:
        for spec in (*sampling.kernel_specs(shape), *penalties.kernel_specs(shape), *logprobs.kernel_specs(shape)):
            key = (spec.function.__name__, sorted(spec.constants.items()), sorted(spec.aligned), spec.num_warps)
            specs.setdefault(repr(key), spec)
    return list(specs.values())


def check(compiled: CompiledKernel) -> None:
    assert compiled.spill_bytes == 0
    assert compiled.shared_bytes <= SHARED_MEMORY_LIMIT[compiled.capability]
    if compiled.spec.is_memory_bound:
        # The vocabulary's row; the other arguments hold one number for a row or for a piece of thousands of logits.
        assert compiled.load_widths["logits_ptr"] == {16}
    # Scores in fp64 are those of the CPU: no approximate division or exponential.
    assert not re.search(r"\b(div|ex2|lg2|sqrt)\.approx\S*\.f64", compiled.ptx)


@pytest.mark.parametrize("name", ["sampling scan, greedy", "sampling draw, drawn", "log-probabilities, scan"])
def test_the_common_launches_on_sm_90(name: str) -> None:
    specs = (*sampling.kernel_specs(QWEN3_06B), *logprobs.kernel_specs(QWEN3_06B))
    spec = next(spec for spec in specs if spec.name == name)
    compiled = compile_kernel(spec, 90)
    check(compiled)
    if "draw" in name:
        assert "mul.wide.u32" in compiled.ptx  # a Philox product is one instruction


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_launches(capability: int) -> None:
    for spec in all_specs():
        check(compile_kernel(spec, capability))


def test_specs_name_every_argument_of_their_kernels() -> None:
    for shape in (LLAMA_8B, QWEN3_06B):
        for spec in (*sampling.kernel_specs(shape), *penalties.kernel_specs(shape), *logprobs.kernel_specs(shape)):
            assert set(spec.function.arg_names) == set(spec.arguments) | set(spec.constants)
            assert set(spec.aligned) <= set(spec.arguments)


def test_costs() -> None:
    assert sampling.sampling_cost(2, 1000, drawn=False).bytes == 8000
    assert sampling.sampling_cost(2, 1000).bytes == 16000
    assert penalties.penalties_cost(10).bytes == 320
    assert penalties.mask_cost(2, 1000).bytes == 8250
    assert logprobs.logprobs_cost(2, 1000, 5).bytes == 8000
