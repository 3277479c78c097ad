"""What is read off PTX: which argument each load belongs to, and how many bytes a thread takes."""

import pytest

pytest.importorskip("triton")

from baton.kernels.gpu.compiling import load_widths

HEAD = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1,
    .param .u32 kernel_param_2,
    .param .u64 kernel_param_3
)
    ld.param.b64  %rd1, [kernel_param_0];
    ld.param.b64  %rd2, [kernel_param_1];
    ld.param.b32  %r1, [kernel_param_2];
    ld.param.b64  %rd3, [kernel_param_3];
"""
LOOP = """
    mad.wide.s32  %rd4, %r2, 4, %rd1;
$L__loop:
    @%p1 ld.global.b32 { %r3 }, [ %rd4 + 0 ];
    cvt.s64.s32  %rd5, %r3;
    mul.lo.s64  %rd6, %rd5, %rd3;
    add.s64  %rd7, %rd2, %rd6;
    cp.async.cg.shared.global [ %r4 + 0 ], [ %rd7 + 0 ], 0x10, %r5;
    ld.shared.v4.b32  {%r6, %r7, %r8, %r9}, [%r4];
    @%p2 ld.global.L1::evict_first.v4.b32 { %r6, %r7, %r8, %r9 }, [ %rd8 + 16 ];
    add.s64  %rd8, %rd7, 64;
    @%p2 bra $L__loop;
"""


def test_a_load_belongs_to_the_pointer_it_was_computed_from() -> None:
    """Not to the table its block id came from; an address may be made after its use, in the turn before."""
    assert load_widths(HEAD + LOOP) == {0: {4}, 1: {16}}


@pytest.mark.parametrize(
    ("load", "width"),
    [
        ("ld.global.b8 %rs1, [%rd2];", 1),
        ("ld.global.nc.v2.b16 {%rs1, %rs2}, [%rd2];", 4),
        ("@!%p1 ld.global.L2::cache_hint.v2.b64 { %rd11, %rd12 }, [ %rd2 + 0 ], %rd13;", 16),
        ("ld.acquire.gpu.global.u64 %rd11, [%rd2];", 8),
        ("cp.async.ca.shared.global [ %r4 + 0 ], [ %rd2 + 0 ], 0x4, 0x4;", 4),
    ],
)
def test_one_narrow_load_among_wide_ones_is_seen(load: str, width: int) -> None:
    assert load_widths(HEAD + LOOP + load) == {0: {4}, 1: {16, width}}


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("ld.global.b32 %r3, [%rd99];", "pointer"),
        ("ld.global.b32 %r3, [%rd3];", "pointer"),  # a number, not a pointer
        ("add.s64 %rd20, %rd1, %rd2;\n ld.global.b32 %r3, [%rd20];", "pointer"),  # of either
        ("cp.async.bulk.shared::cluster.global [%r1], [%rd2], %r2, [%r3];", "width"),
    ],
)
def test_what_cannot_be_told_is_an_error(load: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_widths(HEAD + LOOP + load)
