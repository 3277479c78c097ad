"""Dense products under the interpreter: odd shapes against the definition, and the same bits in any batch."""

from collections.abc import Callable

import pytest
import torch

from baton.kernels import reference
from baton.kernels.gpu import gemm


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"), [(5, 123, 123), (1, 64, 128), (3, 1, 1), (70, 96, 130), (2, 600, 7)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_definition(
    rows: int, in_features: int, out_features: int, dtype: torch.dtype, with_bias: bool
) -> None:
    x, weight = random(rows, in_features, dtype=dtype), random(out_features, in_features, dtype=dtype)
    bias = random(out_features) if with_bias else None
    actual = gemm.linear(x, weight, bias)
    assert actual.dtype == dtype
    expected = reference.linear(x, weight, bias)
    torch.testing.assert_close(actual.float(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype] * in_features**0.5)


def same_bits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Rows alone, in a permuted batch and in a long one are equal bit for bit."""
    whole = gemm.linear(x, weight, bias)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(gemm.linear(x[order], weight, bias), whole[order])
    for row in (0, len(x) // 2, len(x) - 1):
        assert torch.equal(gemm.linear(x[row : row + 1], weight, bias), whole[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    assert gemm.segments_of(800, 20, gemm.tiles_for(dtype, 90, one_segment=False)[0], 120)[0] == 4
    same_bits(random(67, 800, dtype=dtype), random(20, 800, dtype=dtype), random(20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_launches_with_one_segment_a_program_and_with_all_give_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = random(67, 800, dtype=dtype), random(35, 800, dtype=dtype), random(35)
    tiles = gemm.tiles_for(dtype, 90, one_segment=False)
    outs = []
    for tile, is_split in [(tiles[0], True), (tiles[0], False), (tiles[-1], False)]:
        config = gemm.LinearConfig(tile, 3, segment_steps=-(-800 // tile.block_k // 3), is_split=is_split)
        monkeypatch.setattr(gemm, "linear_config", lambda *_, is_int8, config=config: config)
        outs.append(gemm.linear(x, weight, bias))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    torch.testing.assert_close(outs[0].float(), reference.linear(x, weight, bias), rtol=2e-3, atol=5e-2)


def test_configurations_by_literals() -> None:
    """H200, Llama-3.1-8B: qkv and o in segments of K, and the tile grows with the batch but the segments stay."""
    one, prompt = (gemm.linear_config(n, 4096, 6144, torch.bfloat16, 90) for n in (1, 8192))
    assert (one.num_segments, one.segment_steps, one.is_split, one.tile.block_rows) == (3, 22, True, 64)
    assert (prompt.num_segments, prompt.segment_steps, prompt.is_split, prompt.tile.block_rows) == (3, 22, False, 128)
    one, prompt = (gemm.linear_config(n, 4096, 28672, torch.bfloat16, 90) for n in (1, 8192))
    assert (one.num_segments, one.is_split, one.tile.block_rows) == (1, False, 64)
    assert (prompt.num_segments, prompt.is_split, prompt.tile.block_rows) == (1, False, 256)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("is_int8", [False, True])
def test_segments_do_not_depend_on_the_number_of_rows(capability: int, is_int8: bool) -> None:
    for sizes in [(4096, 4096), (14336, 4096), (1024, 1024), (123, 7), (4096, 128256)]:
        configs = [
            gemm.linear_config(rows, *sizes, torch.bfloat16, capability, is_int8=is_int8)
            for rows in (1, 5, 64, 65, 256, 1000, 8192)
        ]
        assert len({(c.num_segments, c.segment_steps, c.tile.block_k) for c in configs}) == 1
        assert (configs[0].num_segments - 1) * configs[0].segment_steps * configs[0].tile.block_k < sizes[0]


def test_reads_and_writes_its_own_rows_only() -> None:
    """x is a view whose gaps are NaN, out a view whose gaps must stay; the product is in one segment or in several."""
    for in_features in (17, 600):
        x = torch.full((5, in_features + 9), torch.nan)
        x[:, 3 : 3 + in_features] = random(5, in_features)
        view, weight = x[:, 3 : 3 + in_features], random(9, in_features)
        buffer = torch.full((5, 20), -7.0)
        out = gemm.linear(view, weight, out=buffer[:, 4:13])
        torch.testing.assert_close(out, reference.linear(view, weight), rtol=1e-5, atol=1e-4)
        assert (buffer[:, :4] == -7).all()
        assert (buffer[:, 13:] == -7).all()


def test_offsets_past_two_to_the_31(sparse_buffer: Callable[[int, torch.dtype], torch.Tensor]) -> None:
    """Rows of x, and of the output, that lie 2^30 elements apart: the third is past what 32 bits can count."""
    stride = 2**30
    x = sparse_buffer(2 * stride + 40, torch.float16).as_strided((3, 40), (stride, 1))
    out = sparse_buffer(2 * stride + 40, torch.float16).as_strided((3, 7), (stride, 1))
    x.copy_(random(3, 40, dtype=torch.float16))
    weight = random(7, 40, dtype=torch.float16)
    gemm.linear(x, weight, out=out)
    assert torch.equal(out, gemm.linear(x.contiguous(), weight))


def test_no_rows_and_another_dtype_for_the_result() -> None:
    assert gemm.linear(torch.empty(0, 8), random(3, 8)).shape == (0, 3)
    x, weight = random(2, 8, dtype=torch.float16), random(3, 8, dtype=torch.float16)
    logits = gemm.linear(x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(logits, reference.linear(x, weight))


def test_refuses_what_does_not_fit() -> None:
    x, weight = random(2, 8), random(3, 8)
    with pytest.raises(ValueError, match="weight has shape"):
        gemm.linear(x, weight[:, :7])
    with pytest.raises(ValueError, match="weight must be contiguous"):
        gemm.linear(x, random(8, 3).T)
    with pytest.raises(ValueError, match="x's rows must be contiguous"):
        gemm.linear(random(8, 2).T, weight)
    with pytest.raises(ValueError, match="weight is torch"):
        gemm.linear(x, weight.half())
    with pytest.raises(ValueError, match="bias has shape"):
        gemm.linear(x, weight, torch.zeros(2))
    with pytest.raises(ValueError, match="out has shape"):
        gemm.linear(x, weight, out=torch.empty(2, 4))


def test_cost_by_hand() -> None:
    assert gemm.linear_cost(2, 10, 30) == gemm.OpCost(2 * (300 + 20 + 60), 2 * 2 * 10 * 30)
