"""The feedback kernel as machine code."""

import pytest

from baton.kernels.gpu.compiling import CAPABILITIES, compile_kernel
from baton.kernels.gpu.feedback import kernel_specs
from baton.kernels.gpu.model_shapes import LLAMA_8B


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_compiles_without_spills(capability: int) -> None:
    (spec,) = kernel_specs(LLAMA_8B)
    assert compile_kernel(spec, capability).spill_bytes == 0
