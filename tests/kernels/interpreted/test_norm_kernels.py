"""RMSNorm and the gated activation under the interpreter, against their definitions."""

import pytest
import torch

from baton.kernels import reference
from baton.kernels.gpu.activation import activation_config, activation_cost, gelu_and_mul, silu_and_mul
from baton.kernels.gpu.norm import add_rms_norm, norm_config, norm_cost, rms_norm

EPS = 1e-5
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3}
NAN = float("nan")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance / 10)


def poisoned(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A view with the values of `rows`, and the buffer around it, NaN everywhere else."""
    buffer = torch.full((rows.shape[0] + 2, rows.shape[1] + 9), NAN, dtype=rows.dtype)
    view = buffer[1:-1, 3:-6]
    view.copy_(rows)
    return view, buffer


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (1, 5), (5, 123), (3, 576), (2, 4096), (1, 16384), (1, 16387)])
def test_rms_norm(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, hidden, dtype=dtype), random(hidden)
    assert_close(rms_norm(x, weight, EPS), reference.rms_norm(x.float(), weight, EPS))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("hidden", [123, 4096, 16387])
def test_add_rms_norm_is_an_addition_then_a_norm(hidden: int, dtype: torch.dtype) -> None:
    x, residual, weight = (random(n, hidden, dtype=dtype) for n in (3, 3, 1))
    residual.mul_(3)
    total = residual + x
    normed = add_rms_norm(x, residual, weight[0], EPS)
    assert torch.equal(residual, total)
    assert torch.equal(normed, rms_norm(total, weight[0], EPS))
    assert_close(normed, reference.rms_norm(total.float(), weight[0].float(), EPS))


@pytest.mark.parametrize("hidden", [123, 16387])
def test_norms_read_and_write_their_rows_only(hidden: int) -> None:
    x, x_buffer = poisoned(random(3, hidden))
    residual, residual_buffer = poisoned(random(3, hidden) * 2)
    out, out_buffer = poisoned(torch.full((3, hidden), NAN))
    weight = random(hidden)
    expected_buffers = x_buffer.clone(), residual_buffer.clone(), out_buffer.clone()
    expected_buffers[1][1:-1, 3:-6] += x
    expected_buffers[2][1:-1, 3:-6] = rms_norm(residual + x, weight, EPS)
    assert add_rms_norm(x, residual, weight, EPS, out=out) is out
    for buffer, expected in zip((x_buffer, residual_buffer, out_buffer), expected_buffers, strict=True):
        torch.testing.assert_close(buffer, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("hidden", [123, 576, 16387])
def test_a_row_has_the_same_bits_in_any_batch(hidden: int) -> None:
    x, residual, weight = random(7, hidden), random(7, hidden) + 1, random(hidden)
    order = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    together, permuted = rms_norm(x, weight, EPS), rms_norm(x[order], weight, EPS)
    assert torch.equal(together[order], permuted)
    assert torch.equal(together[5:6], rms_norm(x[5:6], weight, EPS))
    added = add_rms_norm(x, residual.clone(), weight, EPS)
    assert torch.equal(added[5:6], add_rms_norm(x[5:6], residual[5:6].clone(), weight, EPS))
    assert torch.equal(added[order], add_rms_norm(x[order], residual[order].clone(), weight, EPS))


def test_the_output_may_be_the_input() -> None:
    for hidden in (123, 16387):
        x, weight = random(2, hidden), random(hidden)
        expected = rms_norm(x, weight, EPS)
        assert torch.equal(rms_norm(x, weight, EPS, out=x), expected)


def test_rows_past_two_to_the_31_elements(sparse_buffer) -> None:
    stride = (1 << 30) + 64
    rows = sparse_buffer(2 * stride + 64, torch.float16).as_strided((3, 32), (stride, 1))
    rows.copy_(random(3, 32))
    assert torch.equal(rms_norm(rows, random(32), EPS), rms_norm(rows.contiguous(), random(32), EPS))
    assert torch.equal(silu_and_mul(rows), silu_and_mul(rows.contiguous()))


def test_bfloat16_runs() -> None:
    """The interpreter cuts where the device rounds, so this is a test of types more than of values."""
    x, weight = random(3, 576, dtype=torch.bfloat16), random(576)
    expected = reference.rms_norm(x.float(), weight, EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS).float(), expected, rtol=2**-7, atol=1e-6)
    gate, up = x[:, :288].float(), x[:, 288:].float()
    torch.testing.assert_close(silu_and_mul(x).float(), torch.nn.functional.silu(gate) * up, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "size"), [(5, 123), (1, 1), (2, 1536), (3, 2049)])
def test_silu_and_mul(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up, _ = poisoned(random(rows, 2 * size, dtype=dtype))
    out, out_buffer = poisoned(torch.full((rows, size), NAN, dtype=dtype))
    assert silu_and_mul(gate_up, out=out) is out
    assert_close(out, reference.silu_and_mul(gate_up.float()))
    assert out_buffer.isnan().sum() == out_buffer.numel() - out.numel()
    assert torch.equal(silu_and_mul(gate_up), out)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_gelu_and_mul(dtype: torch.dtype) -> None:
    gate_up, _ = poisoned(4 * random(5, 246, dtype=dtype))
    assert_close(gelu_and_mul(gate_up), reference.gelu_and_mul(gate_up.float()))


def test_gelu_of_large_values() -> None:
    gate_up = torch.tensor([[-1000.0, 1000.0, 0.0, 2.0, 3.0, 5.0]])
    assert gelu_and_mul(gate_up).tolist() == [[0.0, 3000.0, 0.0]]


def test_silu_of_large_values() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 2.0, 3.0, 5.0]])
    assert silu_and_mul(gate_up).tolist() == [[0.0, 600.0, 0.0]]


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 5), torch.ones(5), EPS).shape == (0, 5)
    assert silu_and_mul(torch.empty(0, 10)).shape == (0, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.ones(5), torch.ones(5), EPS), "x has shape"),
        (lambda: rms_norm(torch.ones(2, 5), torch.ones(4), EPS), "weight has shape"),
        (lambda: rms_norm(torch.ones(2, 5).half(), torch.ones(5).double(), EPS), "weight is torch.float64"),
        (lambda: rms_norm(torch.ones(5, 2).T, torch.ones(5), EPS), "x's last dimension"),
        (lambda: rms_norm(torch.ones(2, 5), torch.ones(5), EPS, out=torch.ones(2, 4)), "out has shape"),
        (lambda: add_rms_norm(torch.ones(2, 5), torch.ones(1, 5), torch.ones(5), EPS), "residual has shape"),
        (
            lambda: add_rms_norm(torch.ones(2, 5), torch.ones(2, 5).half(), torch.ones(5), EPS),
            "residual is torch.float16",
        ),
        (lambda: silu_and_mul(torch.ones(2, 5)), "gate_up has 5 columns"),
        (lambda: silu_and_mul(torch.ones(2, 6, dtype=torch.int32)), "gate_up is torch.int32"),
        (lambda: silu_and_mul(torch.ones(2, 6), out=torch.ones(2, 6)), "out has shape"),
    ],
)
def test_a_wrong_argument_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_configurations_by_hand() -> None:
    """A row of 4096 is 8 warps of 16 elements a thread; 16387 is read in two steps."""
    assert norm_config(4096) == {"BLOCK": 4096, "num_warps": 8}
    assert norm_config(5) == {"BLOCK": 8, "num_warps": 1}
    assert norm_config(16387) == {"BLOCK": 16384, "num_warps": 16}
    assert activation_config(14336) == {"BLOCK": 1024, "num_warps": 4}
    assert activation_config(5) == {"BLOCK": 8, "num_warps": 1}


def test_costs_by_hand() -> None:
    """10 rows of 8 bfloat16 values: 160 bytes in, 160 out, 32 of fp32 weights; the residual twice more."""
    assert norm_cost(10, 8, 2, has_residual=False).bytes == 352
    assert norm_cost(10, 8, 2, has_residual=True).bytes == 672
    assert activation_cost(10, 8, 2).bytes == 480
