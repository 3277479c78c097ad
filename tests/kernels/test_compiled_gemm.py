"""The matrix products as machine code: tensor cores, no spills, 16-byte loads, and one instruction for every tile."""

import re

import pytest
import torch

from baton.kernels.gpu import gemm, grouped_gemm, int8_gemm
from baton.kernels.gpu.compiling import CAPABILITIES, SHARED_MEMORY_LIMIT, CompiledKernel, KernelSpec, compile_kernel
from baton.kernels.gpu.model_shapes import LLAMA_8B, MODEL_SHAPES, QWEN3_30B_A3B

MODULES = (gemm, int8_gemm, grouped_gemm)
INSTRUCTION = {
    80: {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"},
    90: {"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"},
    100: {"tcgen05.mma.cta_group::1.kind::f16"},
}
# Read by 16 bytes a thread and no other way; what may be read by fewer: int8's scales of columns, once a tile, the plan
# of a batch's experts, and the place and the weight of each row that combine sums.
STREAMED = {"x", "weight", "weights", "partials", "expert_out"}
NARROW = {"scale", "sorted_pairs", "tile_experts", "tile_starts", "tile_stops", "positions", "expert_weights"}


def specs(capability: int) -> list[KernelSpec]:
    """Over all models, each launch that compiles to other code once."""
    found: dict[object, KernelSpec] = {}
    for module in MODULES:
        for shape in MODEL_SHAPES:
            for spec in module.kernel_specs(shape, capability):
                key = (spec.function, *(str(part) for part in (spec.arguments, spec.constants, spec.aligned)))
                found.setdefault(key, spec)
    return list(found.values())


def check(compiled: CompiledKernel) -> None:
    """What every launch of the models' shapes must be."""
    spec, capability = compiled.spec, compiled.capability
    assert compiled.spill_bytes == 0
    assert compiled.shared_bytes <= SHARED_MEMORY_LIMIT[capability]
    assert {*re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?(0x\w+)", compiled.ptx)} <= {"0x10"}
    if spec.is_memory_bound or spec.uses_tensor_cores:
        assert {name: w for name, w in compiled.load_widths.items() if name not in NARROW and w != {16}} == {}
        assert STREAMED & {*compiled.load_widths}
    if spec.uses_tensor_cores:
        assert compiled.products == INSTRUCTION[capability]
        # Tiles are read by asynchronous copies only; what else is read are the ends of a product: scales and plans.
        assert not re.search(r"ld\.global[\w.:]*\.[bsu](8|16)\b", compiled.ptx)


FAST = [
    gemm.linear_spec(1, (4096, 4096), torch.bfloat16, 90),
    gemm.linear_spec(8192, (4096, 28672), torch.bfloat16, 90),
    gemm.linear_spec(1, (4096, 4096), torch.bfloat16, 90, is_int8=True),
    grouped_gemm.kernel_specs(QWEN3_30B_A3B, 90)[3],
]


@pytest.mark.parametrize("spec", FAST, ids=lambda spec: spec.name)
def test_on_an_h200(spec: KernelSpec) -> None:
    check(compile_kernel(spec, 90))


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_everywhere(capability: int) -> None:
    for spec in specs(capability):
        check(compile_kernel(spec, capability))


def test_tiles_on_sm_100_are_of_one_shape() -> None:
    """There the instruction's shape is in a descriptor, made from the tile: so all tiles are the same."""
    for one_segment in (False, True):
        tiles = gemm.tiles_for(torch.bfloat16, 100, one_segment=one_segment)
        assert [(t.block_rows, t.block_cols, t.block_k) for t in tiles] == [(128, 128, 64)]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_is_proven_is_what_is_launched(capability: int) -> None:
    """Each spec names every argument of its kernel, and its tile is the launcher's own choice."""
    for spec in specs(capability):
        assert {*spec.arguments} | {*spec.constants} == {*spec.function.arg_names}, spec.name
    names = {spec.name for spec in gemm.kernel_specs(LLAMA_8B, 90)}
    assert "linear 4096 to 28672, 8192 rows" in names
    assert "sum of 4 segments" in names
    assert len(grouped_gemm.kernel_specs(LLAMA_8B, capability)) == 0
