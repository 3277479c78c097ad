"""Compile kernels for a GPU that is not there, and read what the machine code costs.

ptxas and cuobjdump come with triton, so registers, spills, shared memory and the instructions used are known on any
Linux machine. Under TRITON_INTERPRET=1 nothing can be compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .launching import compile_options

# Shared memory one block may use, in bytes (CUDA programming guide, compute capabilities 8.0, 9.0, 10.0).
SHARED_MEMORY_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
CAPABILITIES = tuple(SHARED_MEMORY_LIMIT)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel as its launcher would launch it.

    `arguments` maps each runtime argument to its triton type ("*bf16", "i32", "i64", "fp32"); `aligned` names those
    that are divisible by 16 (all pointers are, and are taken to be). `constants` are the tl.constexpr arguments.
    """

    name: str  # as shown in tables, for example "decode attention"
    function: Any  # the jit function
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...] = ()
    uses_tensor_cores: bool = False  # its products must compile to mma (sm_80), wgmma (sm_90), tcgen05 (sm_100)
    is_memory_bound: bool = False  # its loads must be 16 bytes wide


@dataclass(frozen=True)
class CompiledKernel:
    """What ptxas made of a kernel. Register and spill counts are per thread."""

    spec: KernelSpec
    capability: int
    shared_bytes: int
    ptx: str
    cubin: bytes = field(repr=False)

    @cached_property
    def _resources(self) -> Mapping[str, int]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            text = _run_tool("cuobjdump", "-res-usage", file.name)
        return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}

    @property
    def registers(self) -> int:
        return self._resources["REG"]

    @property
    def spill_bytes(self) -> int:
        """Bytes of registers kept in memory: the stack frame, since our kernels have no local arrays."""
        return self._resources["STACK"] + self._resources["LOCAL"]

    @property
    def uses_tensor_cores(self) -> bool:
        """mma.sync on sm_80, wgmma on sm_90, tcgen05 on sm_100."""
        wanted = {80: r"mma\.sync", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}[self.capability]
        return re.search(wanted, self.ptx) is not None

    @property
    def uses_any_tensor_core(self) -> bool:
        """Any of the three: tiles below a warp group's 64 rows are multiplied by mma.sync on every chip."""
        return re.search(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", self.ptx) is not None

    @property
    def has_wide_loads(self) -> bool:
        """Some loads from global memory take 16 bytes a thread (ld.global.v4.b32, cp.async 16, or bulk copies)."""
        pattern = (
            r"ld\.global[\w.:]*\.v4\.b32|ld\.global[\w.:]*\.v2\.b64|cp\.async\.cg\.shared\.global.*0x10|cp\.async\.bulk"
        )
        return re.search(pattern, self.ptx) is not None


def compile_kernel(spec: KernelSpec, capability: int) -> CompiledKernel:
    """Build machine code for sm_`capability`; raises what triton raises when it cannot."""
    names = list(spec.function.arg_names)
    signature = {name: spec.arguments.get(name, "constexpr") for name in names}
    divisible = [n for n, kind in spec.arguments.items() if kind.startswith("*") or n in spec.aligned]
    source = ASTSource(
        fn=spec.function,
        signature=signature,
        constexprs=dict(spec.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=compile_options(spec.num_warps, spec.num_stages))
    return CompiledKernel(spec, capability, compiled.metadata.shared, compiled.asm["ptx"], compiled.asm["cubin"])


def _run_tool(name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True, timeout=60).stdout
