"""pack_linear: fp32 is exact, fp16 is close, both handle biases, no rows, and any float dtype of the file."""

import pytest
import torch

from baton.kernels.cpu import fp16_linear_available, pack_linear

needs_fbgemm = pytest.mark.skipif(not fp16_linear_available(), reason="this torch has no FBGEMM")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), pytest.param("float16", 1e-3, marks=needs_fbgemm)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_matrix_product(rows: int, dtype: str, tolerance: float, with_bias: bool) -> None:
    weight, x = random(123, 64), random(rows, 64)
    bias = random(123) if with_bias else None
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    actual = pack_linear(weight, bias, dtype)(x)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * 10)


@needs_fbgemm
def test_fp16_weights_are_rounded_but_activations_are_not() -> None:
    weight = torch.tensor([[1.0 + 2.0**-12]])  # rounds to 1 in fp16
    x = torch.tensor([[1.0 + 2.0**-20]])  # fp16 would round it to 1
    assert pack_linear(weight, None, "float16")(x).item() == 1.0 + 2.0**-20
    assert pack_linear(weight, None, "float32")(x).item() > 1.0 + 2.0**-12


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_reads_every_float_dtype(stored: torch.dtype) -> None:
    weight = torch.tensor([[0.5, -2.0], [1.0, 0.25]], dtype=stored)  # exact in all three
    x = torch.tensor([[1.0, 2.0]])
    assert pack_linear(weight, None, "float32")(x).tolist() == [[-3.5, 1.5]]
    assert pack_linear(weight, None, "float16")(x).tolist() == [[-3.5, 1.5]]


def test_falls_back_to_float32_without_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kernels.cpu.linear.fp16_linear_available", lambda: False)
    weight = torch.tensor([[1.0 + 2.0**-12]])
    assert pack_linear(weight, None, "float16")(torch.ones(1, 1)).item() == 1.0 + 2.0**-12


def test_refuses_other_dtypes() -> None:
    with pytest.raises(ValueError, match="'int8' is not one of float16, float32"):
        pack_linear(torch.ones(1, 1), None, "int8")
