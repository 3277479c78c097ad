"""Rewrite the tables of docs/performance.md that say what each kernel must move and what its machine code looks like.

    python scripts/write_kernel_tables.py

No GPU is used: costs and floors are arithmetic, and the code is what triton and ptxas make of exactly the launches that
a model runs. It takes minutes, so no test runs it; run it after changing a kernel or a configuration.
"""

import inspect
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from baton.engine.measuring.gpu_cases import GpuSizes, gpu_cases
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
from baton.kernels.gpu.compiling import CAPABILITIES, CompiledKernel, KernelSpec, compile_kernel
from baton.kernels.gpu.cost import OpCost
from baton.kernels.gpu.model_shapes import MODEL_SHAPES, ModelShape

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
MODULES = (
    decode_attention,
    prefill_attention,
    norm,
    activation,
    rope_store,
    block_copy,
    checksum,
    gemm,
    int8_gemm,
    grouped_gemm,
    sampling,
    penalties,
    logprobs,
    feedback,
)
# NVIDIA's datasheet of the H200 SXM.
BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.8e12, 989e12
SIZES = GpuSizes(
    rows=(1, 256, 8192),
    sampled_rows=(1, 256),
    decodes=((1, 1024), (256, 1024), (8, 32768)),
    chunks=((0, 1024), (0, 16384), (8192, 1024)),
)


def cost_table() -> list[str]:
    """A row for each op and size, a column for each model."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for shape in MODEL_SHAPES:
        for case in gpu_cases(shape, torch.device("meta"), sizes=SIZES):
            if not case.op.endswith(("torch", "cuBLAS")):
                op = case.op.removesuffix(", own").replace("qk-norm, rope", "rope")
                cells.setdefault((op, case.size), {})[shape.name] = cost_text(case.cost)
    names = [shape.name for shape in MODEL_SHAPES]
    lines = [f"| op | size | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for (op, size), of_model in cells.items():
        lines.append(f"| {op} | {size} | {' | '.join(of_model.get(name, '') for name in names)} |")
    return lines


def cost_text(cost: OpCost) -> str:
    floor = cost.floor_seconds(BYTES_PER_SECOND, FLOPS_PER_SECOND)
    return f"{amount(cost.bytes)}B, {amount(cost.flops)}op: {duration(floor)}"


def amount(number: int) -> str:
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:  # which rounds to 1
            return f"{number / factor:.3g} {unit}"
    return f"{number} "


def duration(seconds: float) -> str:
    for factor, unit in ((1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.9995 * factor:  # which rounds to 1
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def specs_of(shape: ModelShape, capability: int) -> Iterator[KernelSpec]:
    """All launches of a model on this family of chips."""
    for module in MODULES:
        takes_capability = "capability" in inspect.signature(module.kernel_specs).parameters
        yield from module.kernel_specs(shape, capability) if takes_capability else module.kernel_specs(shape)


@dataclass
class CodeRow:
    """What the launches of one kind, of all models and sizes, compile to on one chip."""

    registers: list[int] = field(default_factory=list)
    shared_bytes: list[int] = field(default_factory=list)
    instructions: set[str] = field(default_factory=set)
    have_wide_loads: bool = True
    spill_bytes: int = 0

    def add(self, kernel: CompiledKernel) -> None:
        self.registers.append(kernel.registers)
        self.shared_bytes.append(kernel.shared_bytes)
        self.instructions.update(instruction.partition(".")[0] for instruction in kernel.products)
        self.have_wide_loads &= any(widths == {16} for widths in kernel.load_widths.values())
        self.spill_bytes = max(self.spill_bytes, kernel.spill_bytes)

    @property
    def text(self) -> str:
        """`96 to 98 r, 53 K, mma, 16 B`."""
        parts = [f"{span(self.registers)} r"]
        if max(self.shared_bytes) >= 1024:
            parts.append(f"{span([round(size / 1024) for size in self.shared_bytes])} K")
        parts += sorted(self.instructions)
        if self.have_wide_loads:
            parts.append("16 B")
        if self.spill_bytes:
            parts.append(f"**{self.spill_bytes} bytes spilled**")
        return ", ".join(parts)


def code_table() -> list[str]:
    """A row for each kind of launch, a column for each chip."""
    rows: dict[str, dict[int, CodeRow]] = {}
    compiled: set[str] = set()
    for capability in CAPABILITIES:
        for spec in (spec for shape in MODEL_SHAPES for spec in specs_of(shape, capability)):
            key = f"{capability} {kind_of(spec.name)} {spec!r}".replace(spec.name, "")
            if key in compiled:
                continue
            compiled.add(key)
            started = time.perf_counter()
            kernel = compile_kernel(spec, capability)
            took = time.perf_counter() - started
            print(
                f"sm_{capability} {spec.name}: {kernel.registers} registers ({took:.1f} s)", file=sys.stderr, flush=True
            )
            rows.setdefault(kind_of(spec.name), {}).setdefault(capability, CodeRow()).add(kernel)
    lines = ["| kernel | sm_80 | sm_90 | sm_100 |", "|---|---|---|---|"]
    for kind, of_chip in rows.items():
        lines.append(f"| {kind} | {' | '.join(of_chip[c].text if c in of_chip else '' for c in CAPABILITIES)} |")
    return lines


def kind_of(name: str) -> str:
    """`linear 4096 to 6144, 256 rows` -> `linear, 256 rows`: models differ, what is launched does not."""
    kind = re.sub(r" (\d+ to \d+|qkv|o|gate_up|down|router)(?=, )", "", name)
    kind = re.sub(r" of \d+ segments", " of segments", kind).replace("qk-norm, rope", "rope")
    return kind.replace(", 1 rows", ", 1 row").replace("experts',", "experts' products,")


def span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def replace_section(text: str, name: str, lines: list[str]) -> str:
    """What stands between the markers of this name."""
    begin, end = f"<!-- {name}: written by scripts/write_kernel_tables.py -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    if not found or end not in rest:
        sys.exit(f"{DOCUMENT} has no markers {begin} and {end}")
    return before + begin + "\n\n" + "\n".join(lines) + "\n\n" + end + rest.partition(end)[2]


def main() -> None:
    text = replace_section(DOCUMENT.read_text(), "kernel costs", cost_table())
    DOCUMENT.write_text(replace_section(text, "kernel code", code_table()))


if __name__ == "__main__":
    main()
