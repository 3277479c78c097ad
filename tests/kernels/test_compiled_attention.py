"""Attention kernels as machine code: no spills, shared memory within the chip, tensor cores, 16-byte loads."""

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from baton.kernels.gpu import decode_attention, prefill_attention
from baton.kernels.gpu.compiling import CAPABILITIES, SHARED_MEMORY_LIMIT, KernelSpec, compile_kernel, parse_sass
from baton.kernels.gpu.model_shapes import LLAMA_8B, MODEL_SHAPES

VARIANTS = [{"window": 4096}, {"soft_cap": 50.0}, {"window": 4096, "soft_cap": 50.0}, {"block_size": 1}]
GEMMA_2_9B = dataclasses.replace(LLAMA_8B, name="Gemma-2-9B", num_heads=16, num_kv_heads=8, head_dim=256)

MMA = {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
# Queries, keys, values and partial results are read by 16 bytes a thread and no other way. By 4 bytes: block ids (one
# for a row of a tile), the batch's lengths, and a number for each row of partial results, which is D times as long.
LENGTHS = {"context_lens": {4}}
READS = {
    "decode attention": {"query": {16}, "kv": {16}, "tables": {4}} | LENGTHS,
    "decode attention, combine": {"partial_out": {16}, "partial_lse": {4}} | LENGTHS,
    "prefill attention": {"query": {16}, "kv": {16}, "tables": {4}, "cu_seqlens": {4}} | LENGTHS,
}


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


def wanted_products(spec: KernelSpec, capability: int) -> set[str]:
    """The kinds of instructions of queries by keys and weights by values together. Decode's tiles have 16 rows, fewer
    than the 64 of a warp group, so mma.sync is theirs on every chip."""
    if not spec.uses_tensor_cores:
        return set()
    if "ROW_TILE" not in spec.constants or capability == 80:
        return MMA
    if capability == 100:
        return {"tcgen05.mma.cta_group::1.kind::f16"}
    # 128 rows are shared out to two warp groups; at head size 256 there are 64, and the columns are shared instead.
    columns = (64, 128) if spec.constants["ROW_TILE"] == 128 else (16, 128)
    return {f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16" for n in columns}


def check(spec: KernelSpec, capability: int) -> None:
    kernel = compile_kernel(spec, capability)
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= SHARED_MEMORY_LIMIT[capability]
    assert kernel.products == wanted_products(spec, capability)
    # Without a tensor core the smaller of decode's two products is 16 * 32 * 128 multiply-adds over 128 threads.
    assert len(re.findall(r"\bfma\.", kernel.ptx)) < 512, "a product by plain multiply-adds"
    assert kernel.load_widths == READS[spec.name]


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


def overlap_of_loops(sass: tuple[tuple[int, str], ...]) -> list[tuple[int, int]]:
    """For each innermost loop with wgmma: (exponentials issued between a group's first product and the wait for the
    group, all exponentials)."""
    jumps = [(int(m[1], 16), at) for at, text in sass if (m := re.search(r"\bBRA\b.* 0x([0-9a-f]+)$", text))]
    loops = [(begin, end) for begin, end in jumps if begin < end]
    found = []
    for begin, end in loops:
        if any(begin <= other and last < end for other, last in loops):
            continue
        under, all_of_them, pending = 0, 0, None
        for text in (text for address, text in sass if begin <= address <= end):
            if "HGMMA" in text:
                pending = pending or 0
            elif "WARPGROUP.DEPBAR" in text:
                under, pending = under + (pending or 0), None
            elif "MUFU.EX2" in text:
                all_of_them += 1
                pending = None if pending is None else pending + 1
        if any("HGMMA" in text for address, text in sass if begin <= address <= end):
            found.append((under, all_of_them))
    return found


def test_prefill_takes_exponentials_while_the_next_scores_are_multiplied() -> None:
    """PTX waits for the products of queries and keys right behind them; it is ptxas that moves exponentials up between
    them, because the tile's own scores came from the turn before. So this is seen in SASS only: in both loops, over
    whole and over masked tiles, a thread's 32 weights and the two factors of its old sums."""
    kernel = compile_kernel(prefill_attention.kernel_specs(LLAMA_8B, 90)[0], 90)
    loops = overlap_of_loops(kernel.sass)
    assert [of_all for _, of_all in loops] == [34, 34]
    assert all(under >= 17 for under, _ in loops), loops
    assert "cp.async.wait_group \t2" in kernel.ptx  # copies are two tiles ahead


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("HGMMA HGMMA WARPGROUP.DEPBAR.LE MUFU.EX2 MUFU.EX2 HGMMA WARPGROUP.DEPBAR.LE", (0, 2)),  # FlashAttention-2
        ("HGMMA WARPGROUP.DEPBAR.LE HGMMA WARPGROUP.DEPBAR.LE MUFU.EX2", (0, 1)),  # every product waited for
        ("HGMMA MUFU.EX2 HGMMA MUFU.EX2 WARPGROUP.DEPBAR.LE MUFU.EX2 HGMMA", (2, 3)),
    ],
)
def test_overlap_is_counted_within_a_group_only(order: str, expected: tuple[int, int]) -> None:
    lines = ["MUFU.EX2 R1, R1", "HGMMA R2", *order.split(), "@!P0 BRA 0x0020", "MUFU.EX2 R1, R1", "BRA 0x00b0"]
    listing = "\n".join(f"  /*{16 * i:04x}*/  {text} ;  /* 0x00 */" for i, text in enumerate(lines))
    assert overlap_of_loops(parse_sass(listing)) == [expected]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_compile(dtype: torch.dtype) -> None:
    for make in (decode_attention.kernel_specs, prefill_attention.kernel_specs):
        kernel = compile_kernel(make(LLAMA_8B, 90, dtype=dtype)[0], 90)
        assert kernel.spill_bytes == 0
