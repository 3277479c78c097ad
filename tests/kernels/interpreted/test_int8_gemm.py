"""Weight-only int8 under the interpreter: the rule, odd shapes against the definition, the same bits in any batch."""

import pytest
import torch

from baton.kernels import reference
from baton.kernels.gpu import gemm, int8_gemm


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_the_rule_by_hand() -> None:
    """Scale 1/127 of the largest; 0.5 and 1.5 of a step round to even; zeros stay zeros."""
    weight = torch.tensor([[127.0, -127.0, 0.5, 1.5, -2.4], [0.0, 0.0, 0.0, 0.0, 0.0]])
    for values, scale in (reference.quantize_int8(weight), int8_gemm.quantize_int8(weight)):
        assert values.dtype == torch.int8
        assert values.tolist() == [[127, -127, 0, 2, -2], [0, 0, 0, 0, 0]]
        assert scale.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantising_follows_the_rule_in_every_dtype(dtype: torch.dtype) -> None:
    weight = random(37, 53, dtype=dtype)
    values, scale = int8_gemm.quantize_int8(weight)
    expected_values, expected_scale = reference.quantize_int8(weight)
    assert torch.equal(values, expected_values)
    assert torch.equal(scale, expected_scale)
    error = (values.float() * scale.unsqueeze(1) - weight.float()).abs()
    assert (error <= scale.unsqueeze(1) * 0.50001).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"), [(5, 123, 123), (1, 64, 128), (3, 1, 1), (70, 96, 130), (2, 600, 7)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_definition(
    rows: int, in_features: int, out_features: int, dtype: torch.dtype, tolerance: float, with_bias: bool
) -> None:
    x = random(rows, in_features, dtype=dtype)
    values, scale = int8_gemm.quantize_int8(random(out_features, in_features))
    bias = random(out_features) if with_bias else None
    actual = int8_gemm.int8_linear(x, values, scale, bias)
    assert actual.dtype == dtype
    expected = reference.int8_linear(x, values, scale, bias)
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance * in_features**0.5)


def test_every_int8_value_is_multiplied_exactly() -> None:
    values = torch.arange(-128, 128, dtype=torch.int8).unsqueeze(1)
    actual = int8_gemm.int8_linear(torch.ones(1, 1, dtype=torch.float16), values, torch.ones(256))
    assert actual[0].tolist() == list(range(-128, 128))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split launches for few rows and whole ones for many, with a scale and a bias at the end of either."""
    segments_of = gemm.segments_of(800, 40, gemm.tiles_for(dtype, 90, one_segment=False)[0], 120)
    monkeypatch.setattr(gemm, "segments_of", lambda *_: segments_of)
    monkeypatch.setattr(gemm, "_WANTED_PROGRAMS", 3)
    configs = [gemm.linear_config(rows, 800, 40, dtype, 90, is_int8=True) for rows in (1, 130)]
    assert [(config.is_split, config.num_segments) for config in configs] == [(True, 4), (False, 4)]
    x, bias = random(130, 800, dtype=dtype), random(40)
    values, scale = int8_gemm.quantize_int8(random(40, 800))
    whole = int8_gemm.int8_linear(x, values, scale, bias)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(int8_gemm.int8_linear(x[order], values, scale, bias), whole[order])
    for row in (0, 64, 129):
        assert torch.equal(int8_gemm.int8_linear(x[row : row + 1], values, scale, bias), whole[row : row + 1])


def test_reads_and_writes_its_own_rows_only() -> None:
    x = torch.full((5, 30), torch.nan)
    x[:, 3:20] = random(5, 17)
    values, scale = int8_gemm.quantize_int8(random(9, 17))
    buffer = torch.full((5, 20), -7.0)
    out = int8_gemm.int8_linear(x[:, 3:20], values, scale, out=buffer[:, 4:13])
    torch.testing.assert_close(out, reference.int8_linear(x[:, 3:20], values, scale))
    assert (buffer[:, :4] == -7).all()
    assert (buffer[:, 13:] == -7).all()


def test_no_rows_and_another_dtype_for_the_result() -> None:
    values, scale = int8_gemm.quantize_int8(random(3, 8))
    assert int8_gemm.int8_linear(torch.empty(0, 8), values, scale).shape == (0, 3)
    logits = int8_gemm.int8_linear(random(2, 8, dtype=torch.float16), values, scale, out_dtype=torch.float32)
    assert logits.dtype == torch.float32


def test_refuses_what_does_not_fit() -> None:
    values, scale = int8_gemm.quantize_int8(random(3, 8))
    with pytest.raises(ValueError, match="weight_int8 is torch"):
        int8_gemm.int8_linear(random(2, 8), values.float(), scale)
    with pytest.raises(ValueError, match="scale has shape"):
        int8_gemm.int8_linear(random(2, 8), values, scale[:2])
