"""Dense products under the interpreter: odd shapes against the definition, and the same bits in any batch."""

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
    assert gemm.segments_of(800, 40, gemm.tiles_for(dtype, 90, one_segment=False)[0])[0] == 4
    same_bits(random(130, 800, dtype=dtype), random(40, 800, dtype=dtype), random(40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_launch_for_all_segments_and_one_for_each_give_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = random(131, 800, dtype=dtype), random(140, 800, dtype=dtype), random(140)
    configs = {}
    for programs in (120, 1):  # how many programs are enough decides both the tile and who adds the segments
        config = gemm.linear_config(131, 800, 140, dtype, 90)
        chosen = gemm.LinearConfig(config.tile, 4, config.segment_steps, is_split=programs == 120)
        if programs == 1:
            chosen = gemm.LinearConfig(gemm.tiles_for(dtype, 90, one_segment=False)[-1], 4, config.segment_steps, False)
        monkeypatch.setattr(gemm, "linear_config", lambda *_, chosen=chosen: chosen)
        configs[chosen] = gemm.linear(x, weight, bias)
        monkeypatch.undo()
    (split, whole) = configs.values()
    assert torch.equal(split, whole)
