"""The small ops against their definitions, at odd shapes."""

import pytest
import torch

from baton.kernels import reference
from baton.kernels.cpu import apply_rope, gelu_and_mul, rms_norm, silu_and_mul


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(1, 576), (5, 123), (3, 4, 16)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(shape[-1])
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5).float())


def test_rms_norm_by_hand() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 1.0])  # the mean square is 12.5
    expected = torch.tensor([[6.0, 4.0]]) / 12.5**0.5
    torch.testing.assert_close(reference.rms_norm(x, weight, 0.0), expected)
    torch.testing.assert_close(rms_norm(x, weight, 0.0), expected)


def test_rope_by_hand() -> None:
    """A quarter turn maps the pair (first, second) to (-second, first)."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])  # pairs (1, 3) and (2, 4)
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    expected = [[[-3.0, 2.0, 1.0, 4.0]]]
    assert reference.apply_rope(x, cos, sin).tolist() == expected
    apply_rope(x, cos.unsqueeze(1), sin.unsqueeze(1))
    assert x.tolist() == expected


def test_rope_changes_a_strided_view_in_place_and_nothing_beside_it() -> None:
    heads = random(5, 7, 16)
    before = heads.clone()
    angles = random(5, 8)
    apply_rope(heads[:, :4], angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))
    torch.testing.assert_close(heads[:, :4], reference.apply_rope(before[:, :4], angles.cos(), angles.sin()))
    assert torch.equal(heads[:, 4:], before[:, 4:])


def test_silu_and_mul() -> None:
    gate_up = random(5, 246)
    torch.testing.assert_close(silu_and_mul(gate_up), reference.silu_and_mul(gate_up.double()).float())
    assert silu_and_mul(torch.tensor([[0.0, 5.0]])).item() == 0.0


def test_gelu_and_mul() -> None:
    gate_up = torch.randn((5, 246), generator=torch.Generator().manual_seed(2)) * 4
    torch.testing.assert_close(gelu_and_mul(gate_up), reference.gelu_and_mul(gate_up.double()).float())
    assert gelu_and_mul(torch.tensor([[0.0, 5.0]])).item() == 0.0
    assert gelu_and_mul(torch.tensor([[20.0, 5.0]])).item() == 100.0
