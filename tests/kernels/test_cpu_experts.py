"""A mixture of experts on the CPU against its definition: tokens sorted by expert change no token's result."""

import pytest
import torch

from baton.kernels import reference
from baton.kernels.cpu import pack_experts

HIDDEN, SIZE = 12, 20


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (5, 1), (5, 3), (5, 5), (64, 8)])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_equals_the_definition(num_tokens: int, num_experts: int, top_k: int, renormalize: bool) -> None:
    gate_up, down = random(num_experts, 2 * SIZE, HIDDEN), random(num_experts, HIDDEN, SIZE)
    x, logits = random(num_tokens, HIDDEN), random(num_tokens, num_experts)
    experts = pack_experts(zip(gate_up, down, strict=True), top_k, renormalize=renormalize, dtype="float32")
    expected = reference.moe_forward(x, logits, gate_up, down, top_k, renormalize)
    torch.testing.assert_close(experts(x, logits), expected, rtol=1e-5, atol=1e-4)


def test_only_the_chosen_experts_are_computed() -> None:
    """By hand: token 0 goes to expert 2, token 1 to expert 0; the others would give NaN."""
    gate_up, down = torch.ones(4, 2, 1), torch.tensor([3.0, float("nan"), 5.0, float("nan")]).view(4, 1, 1)
    experts = pack_experts(zip(gate_up, down, strict=True), 1, renormalize=True, dtype="float32")
    out = experts(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0, 1, 9, 2], [4.0, 1, 1, 1]]))
    silu = torch.nn.functional.silu
    torch.testing.assert_close(out.view(-1), torch.stack((5 * silu(torch.tensor(1.0)), 6 * silu(torch.tensor(2.0)))))


def test_equal_probabilities_go_to_the_lower_expert() -> None:
    gate_up, down = torch.ones(3, 2, 1), torch.tensor([1.0, 7.0, 7.0]).view(3, 1, 1)
    experts = pack_experts(zip(gate_up, down, strict=True), 1, renormalize=True, dtype="float32")
    torch.testing.assert_close(experts(torch.ones(1, 1), torch.zeros(1, 3)), torch.full((1, 1), 0.7310586))


def test_no_tokens() -> None:
    experts = pack_experts([(torch.ones(2, 1), torch.ones(1, 1))], 1, renormalize=True, dtype="float32")
    assert experts(torch.empty(0, 1), torch.empty(0, 1)).shape == (0, 1)
