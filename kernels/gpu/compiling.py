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
    uses_tensor_cores: bool = False  # its products must compile to mma, wgmma or tcgen05, as the chip and the tile want
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
        text = _dump(self.cubin, "-res-usage")
        return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}

    @cached_property
    def sass(self) -> tuple[tuple[int, str], ...]:
        """The machine's own instructions in order, as (address, text): what ptxas scheduled, which PTX does not say."""
        return parse_sass(_dump(self.cubin, "-sass"))

    @cached_property
    def products(self) -> frozenset[str]:
        """The kinds of tensor core instructions, each as PTX spells it."""
        return frozenset(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b[\w.:]*", self.ptx))

    @cached_property
    def load_widths(self) -> Mapping[str, frozenset[int]]:
        """For each pointer argument read from, the bytes a thread takes in each kind of load (see `load_widths`)."""
        names = [name for name in self.spec.function.arg_names if name in self.spec.arguments]
        return {names[place]: widths for place, widths in load_widths(self.ptx).items()}

    @property
    def registers(self) -> int:
        return self._resources["REG"]

    @property
    def spill_bytes(self) -> int:
        """Bytes of registers kept in memory: the stack frame, since our kernels have no local arrays."""
        return self._resources["STACK"] + self._resources["LOCAL"]


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


def parse_sass(listing: str) -> tuple[tuple[int, str], ...]:
    """The instructions of `cuobjdump -sass`, as (address, text without the encoding)."""
    found = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;", listing, re.MULTILINE)
    return tuple((int(address, 16), text) for address, text in found)


def load_widths(ptx: str) -> Mapping[int, frozenset[int]]:
    """For each parameter of a kernel that is read from global memory, by its place: the bytes of each kind of load.

    A load belongs to the pointer its address was computed from, followed through 64-bit registers. What is loaded is a
    number, never an address, so a block id does not make the table it came from the origin of the block's loads.
    Raises ValueError for a load whose pointer is not found or not one: nothing is left out in silence.
    """
    origins: dict[str, set[int]] = {}
    steps: list[tuple[set[int], str, list[str]]] = []
    loads: list[tuple[str, str]] = []
    for line in re.sub(r"//.*", "", ptx).splitlines():
        statement = re.sub(r"^\s*(@!?%p\d+\s+)?", "", line)
        if re.match(r"ld\.(?!(\w+\.)*(param|shared|local|const))|cp\.async\.(?!commit|wait|mbarrier)", statement):
            loads.append((statement, ["", *re.findall(r"\[\s*(%rd\d+)", statement)][-1]))
        elif match := re.match(r"[a-z][\w.:]*\s+(%rd\d+)\s*,(.*)", statement):
            place = re.search(r"_param_(\d+)\]", match[2]) if statement.startswith("ld.param") else None
            steps.append(({int(place[1])} if place else set(), match[1], re.findall(r"%rd\d+", match[2])))
    changed = True
    while changed:  # loops hand addresses back to earlier lines
        changed = False
        for start, target, sources in steps:
            reached = start.union(*(origins.get(source, set()) for source in sources))
            changed |= not reached <= origins.setdefault(target, set())
            origins[target] |= reached
    pointers = {int(place) for place in re.findall(r"\.param \.u64 \.ptr[^,)]*?_param_(\d+)", ptx)}
    widths: dict[int, set[int]] = {}
    for statement, address in loads:
        found = origins.get(address, set()) & pointers
        if len(found) != 1:
            raise ValueError(f"the pointer of {statement!r} is not found: it may be any of the parameters {found}")
        widths.setdefault(found.pop(), set()).add(_load_bytes(statement))
    return {place: frozenset(sizes) for place, sizes in sorted(widths.items())}


def _load_bytes(statement: str) -> int:
    if match := re.match(r"cp\.async\.c[ag]\..*?0x([0-9a-f]+)", statement):
        return int(match[1], 16)
    if match := re.match(r"ld\.[\w.:]*?(?:\.v(\d))?\.[bsuf](\d+)\b", statement):
        return int(match[1] or 1) * int(match[2]) // 8
    raise ValueError(f"the width of {statement!r} is not known: teach kernels/gpu/compiling.py to read it")


def _dump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run_tool("cuobjdump", option, file.name)


def _run_tool(name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True, timeout=60).stdout
