"""Mixtures of experts under the interpreter: routing, the plan, the products, and the same bits in any batch."""

import pytest
import torch

from baton.kernels import reference
from baton.kernels.gpu import expert_plan, grouped_gemm


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize(("rows", "num_experts", "top_k"), [(1, 4, 2), (5, 7, 3), (9, 128, 8), (2, 1, 1), (3, 5, 5)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_routing_equals_the_definition(rows: int, num_experts: int, top_k: int, renormalize: bool) -> None:
    logits = random(rows, num_experts)
    logits[0] = logits[0].round()  # ties
    weights, ids = grouped_gemm.route_experts(logits, top_k, renormalize)
    expected_weights, expected_ids = reference.route_experts(logits, top_k, renormalize)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)


def test_routing_by_hand() -> None:
    """Equal logits go to the lower id; exp(ln 3) = 3 of a sum of 6."""
    logits = torch.tensor([[0.0, torch.tensor(3.0).log().item(), 0.0, 0.0]])
    for routed in (reference.route_experts(logits, 2, True), grouped_gemm.route_experts(logits, 2, True)):
        torch.testing.assert_close(routed[0], torch.tensor([[0.75, 0.25]]))
        assert routed[1].tolist() == [[1, 0]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gets_ids_that_exist(bad: float) -> None:
    """A graph's padding rows hold anything, and an id past the last expert would be a stray read."""
    logits = torch.full((2, 5), bad)
    logits[1] = torch.arange(5.0)
    weights, ids = grouped_gemm.route_experts(logits, 3, True)
    assert ids.tolist() == [[0, 1, 2], [4, 3, 2]]
    assert weights[0].isnan().all()
    assert weights[1].isfinite().all()


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "top_k", "num_experts"), [(1, 1, 1), (5, 3, 7), (200, 2, 3), (700, 2, 128)])
def test_the_plan_sorts_pairs_and_covers_each_expert_with_tiles(
    rows: int, top_k: int, num_experts: int, id_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(num_experts, (rows, top_k), generator=generator)
    ids[ids == 1] = 0  # an expert that nobody chose
    plan = expert_plan.plan_experts(ids.to(id_dtype), num_experts, torch.float32)
    owners, order = ids.flatten().sort(stable=True)
    assert torch.equal(plan.sorted_pairs.long(), order)
    assert torch.equal(plan.positions[order], torch.arange(len(order), dtype=torch.int32))
    covered = []
    tiles = (plan.tile_experts.tolist(), plan.tile_starts.tolist(), plan.tile_stops.tolist())
    for expert, start, stop in zip(*tiles, strict=True):
        if expert >= 0:
            assert 0 < stop - start <= plan.tile.block_rows
            assert (owners[start:stop] == expert).all()
            covered += range(start, stop)
    assert covered == list(range(len(order)))


def test_a_pair_without_an_expert_has_no_row_and_adds_nothing() -> None:
    ids = torch.tensor([[1, -1], [3, 0]], dtype=torch.int32)
    plan = expert_plan.plan_experts(ids, 3, torch.float32)
    assert plan.positions.tolist() == [1, -1, -1, 0]
    rows = grouped_gemm.grouped_linear(torch.eye(2), torch.ones(3, 2, 2) * 2, plan, is_sorted=False)
    combined = grouped_gemm.combine_experts(rows, torch.ones(2, 2), plan)
    assert combined.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def layer(num_experts: int, hidden: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up, down = random(num_experts, 2 * size, hidden), random(num_experts, hidden, size)
    return (gate_up * hidden**-0.5).to(dtype), (down * size**-0.5).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k", "hidden", "size"), [(5, 3, 2, 123, 41), (1, 4, 4, 64, 32), (40, 2, 1, 17, 130)]
)
def test_a_layer_equals_the_definition(
    rows: int, num_experts: int, top_k: int, hidden: int, size: int, dtype: torch.dtype, tolerance: float
) -> None:
    gate_up, down = layer(num_experts, hidden, size, dtype)
    x, logits = random(rows, hidden, dtype=dtype), random(rows, num_experts)
    actual = grouped_gemm.moe_forward(x, logits, gate_up, down, top_k, True)
    assert actual.dtype == dtype
    expected = reference.moe_forward(x, logits, gate_up, down, top_k, True)
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    gate_up, down = layer(3, 70, 20, dtype)
    x, logits = random(12, 70, dtype=dtype), random(12, 3)
    whole = grouped_gemm.moe_forward(x, logits, gate_up, down, 2, True)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert torch.equal(grouped_gemm.moe_forward(x[order], logits[order], gate_up, down, 2, True), whole[order])
    for row in (0, 11):
        alone = slice(row, row + 1)
        assert torch.equal(grouped_gemm.moe_forward(x[alone], logits[alone], gate_up, down, 2, True), whole[alone])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_in_a_narrow_tile_and_in_a_wide_one(dtype: torch.dtype) -> None:
    assert [expert_plan.expert_tile(n, 1, torch.float16, 90).block_rows for n in (95, 96)] == [64, 128]
    x, weights = random(130, 70, dtype=dtype), random(1, 20, 70, dtype=dtype)
    outs = []
    for rows in (130, 7, 1):
        plan = expert_plan.plan_experts(torch.zeros(rows, 1, dtype=torch.int32), 1, dtype)
        outs.append(grouped_gemm.grouped_linear(x[130 - rows :], weights, plan, is_sorted=False))
    assert torch.equal(outs[0][-7:], outs[1])
    assert torch.equal(outs[0][-1:], outs[2])


def test_reads_and_writes_its_own_rows_only() -> None:
    """x is a view whose gaps are NaN, out a view whose gaps must stay."""
    x = torch.full((5, 30), torch.nan)
    x[:, 3:20] = random(5, 17)
    plan = expert_plan.plan_experts(torch.tensor([[0], [2], [0], [1], [2]], dtype=torch.int32), 3, torch.float32)
    weights = random(3, 9, 17)
    buffer = torch.full((5, 20), -7.0)
    out = grouped_gemm.grouped_linear(x[:, 3:20], weights, plan, is_sorted=False, out=buffer[:, 4:13])
    pairs = [(0, 0), (2, 0), (3, 1), (1, 2), (4, 2)]
    expected = torch.stack([reference.linear(x[t : t + 1, 3:20], weights[e])[0] for t, e in pairs])
    torch.testing.assert_close(out, expected)
    assert (buffer[:, :4] == -7).all()
    assert (buffer[:, 13:] == -7).all()


def test_no_tokens() -> None:
    gate_up, down = layer(3, 8, 4, torch.float32)
    assert grouped_gemm.moe_forward(torch.empty(0, 8), torch.empty(0, 3), gate_up, down, 2, True).shape == (0, 8)


def test_refuses_what_does_not_fit() -> None:
    gate_up, down = layer(3, 8, 4, torch.float32)
    x, logits = random(2, 8), random(2, 3)
    with pytest.raises(ValueError, match="top_k is 4"):
        grouped_gemm.moe_forward(x, logits, gate_up, down, 4, True)
    with pytest.raises(ValueError, match="router_logits has shape"):
        grouped_gemm.moe_forward(x, logits[:1], gate_up, down, 2, True)
    with pytest.raises(ValueError, match="weights is torch"):
        grouped_gemm.moe_forward(x, logits, gate_up.half(), down, 2, True)
