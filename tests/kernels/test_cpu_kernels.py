"""CpuKernels, the ops as models see them, against the definitions."""

import pytest
import torch

from baton.kernels import AttentionRule, KernelSet, QKNorm, Rope, reference
from baton.kernels.cpu import CpuKernels, plan_attention

KERNELS: KernelSet = CpuKernels()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_add_rms_norm_adds_in_place() -> None:
    x, residual, weight = random(5, 12), random(5, 12) * 2, random(12)
    total = x + residual
    normed = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, reference.rms_norm(total, weight, 1e-5))


def test_rope_angles_by_hand() -> None:
    angles = KERNELS.pack_rope(torch.tensor([1.0, 0.5]), 10, 1.0)(torch.tensor([0, 2]))
    torch.testing.assert_close(angles.cos, torch.tensor([[0.0, 0.0], [2.0, 1.0]]).cos())
    torch.testing.assert_close(angles.sin, torch.tensor([[0.0, 0.0], [2.0, 1.0]]).sin())


@pytest.mark.parametrize("with_norm", [False, True])
def test_norm_rope_store_and_attention(with_norm: bool) -> None:
    """Two prompts of 3 and 2 tokens; the cache is NaN wherever nothing was stored."""
    num_heads, num_kv_heads, head_dim, slots = 4, 2, 8, [8, 9, 10, 0, 1]
    heads = random(5, num_heads + 2 * num_kv_heads, head_dim)
    rope = Rope(random(5, 4).cos(), random(5, 4).sin())
    norm = QKNorm(random(8).abs(), random(8).abs() + 1, 1e-5) if with_norm else None
    cache = torch.full((3, 1, 2, num_kv_heads, 4, head_dim), torch.nan)
    expected_cache, query = cache.clone(), heads[:, :num_heads].clone()
    key, value = heads[:, num_heads:].clone().chunk(2, 1)
    if norm is not None:
        query = reference.rms_norm(query, norm.q_weight, norm.eps)
        key = reference.rms_norm(key, norm.k_weight, norm.eps)
    query, key = (reference.apply_rope(x, *rope) for x in (query, key))
    reference.store_kv(expected_cache[:, 0], torch.stack((key, value), 1), slots)
    tables = [torch.tensor([2]), torch.tensor([0])]
    plan = plan_attention(cache[:, 0], torch.tensor(slots), [0, 3, 5], [3, 2], tables)

    KERNELS.norm_rope_store(heads, num_heads, norm, rope, cache[:, 0], plan)
    torch.testing.assert_close(cache, expected_cache, equal_nan=True)
    torch.testing.assert_close(heads[:, :num_heads], query)
    attended = KERNELS.attention(heads, num_heads, cache[:, 0], plan, AttentionRule(heads.shape[2] ** -0.5))
    expected = reference.paged_attention(query, expected_cache[:, 0], [0, 3, 5], [3, 2], [[2], [0]])
    torch.testing.assert_close(attended, expected.flatten(1))
