"""share_budget: literals, and what must hold for any prompts of any ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.queueing import Rank
from baton.engine.chunk_planning import plan_chunks
from baton.worker.packing import pack_chunks
from baton.worker.urgency import LEAST_SHARE, share_budget

HIGH, LOW, BATCH = Rank(False, 0), Rank(False, 4), Rank(True, 0)


@pytest.mark.parametrize(
    ("remaining", "ranks", "counts"),
    [
        ([100, 20], [HIGH, LOW], [64, 0]),  # the oldest is the most urgent, and moves
        ([100, 100], [LOW, HIGH], [8, 56]),  # the oldest moves by an eighth
        ([3, 100], [LOW, HIGH], [3, 61]),  # or by what it lacks
        ([100, 20], [LOW, HIGH], [44, 20]),  # or by what is left, which is more
        ([0, 100, 100], [LOW, LOW, HIGH], [0, 8, 56]),  # one without anything to compute yet is passed over
        ([100, 100], [BATCH, HIGH], [0, 64]),  # batch gets what is left
        ([100, 20], [BATCH, HIGH], [44, 20]),
        ([100, 100], [BATCH, BATCH], [64, 0]),
        ([30, 30, 30], [BATCH, LOW, HIGH], [4, 30, 30]),
    ],
)
def test_the_most_urgent_come_first(remaining: list[int], ranks: list[Rank], counts: list[int]) -> None:
    assert share_budget(remaining, ranks, 64, 64) == counts


def test_those_of_one_rank_are_packed_by_length() -> None:
    assert share_budget([10, 3], [HIGH, HIGH], 8, 8, packs=True) == [5, 3]
    assert share_budget([10, 3], [HIGH, HIGH], 8, 8) == [8, 0]
    # a later one of a lower class is not: who comes next may need that room
    assert share_budget([10, 3], [HIGH, LOW], 8, 8, packs=True) == [8, 0]


RANKS = st.sampled_from([HIGH, Rank(False, 1), LOW, BATCH, Rank(True, 1)])
PROMPTS = st.lists(st.tuples(st.integers(0, 40), RANKS), max_size=8)


@given(PROMPTS, st.integers(1, 64), st.integers(1, 64), st.booleans())
def test_whatever_the_ranks(prompts: list[tuple[int, Rank]], budget: int, chunk: int, packs: bool) -> None:
    remaining, ranks = [n for n, _ in prompts], [rank for _, rank in prompts]
    counts = share_budget(remaining, ranks, budget, chunk, packs=packs)
    assert all(0 <= count <= min(left, chunk) for count, left in zip(counts, remaining, strict=True))
    assert sum(counts) == sum(plan_chunks(remaining, budget, chunk)), "no urgency leaves the device idle"
    interactive = [i for i, rank in enumerate(ranks) if not rank.is_batch]
    alone = share_budget(
        [remaining[i] for i in interactive], [ranks[i] for i in interactive], budget, chunk, packs=packs
    )
    assert [counts[i] for i in interactive] == alone, "batch takes nothing from the others"
    oldest = next((i for i in interactive if remaining[i]), None)
    assert (
        oldest is None
        or counts[oldest] >= min(max(budget // LEAST_SHARE, 1), remaining[oldest], chunk, budget)
        or (packs and ranks[oldest] == min(ranks))
    )


@given(PROMPTS, st.integers(1, 64), st.integers(1, 64))
def test_the_least_urgent_cost_the_most_urgent_an_eighth_at_most(prompts, budget: int, chunk: int) -> None:
    remaining, ranks = [n for n, _ in prompts], [rank for _, rank in prompts]
    top = [i for i, rank in enumerate(ranks) if rank == min(ranks)]
    alone = sum(plan_chunks([remaining[i] for i in top], budget, chunk))
    counts = share_budget(remaining, ranks, budget, chunk)
    assert sum(counts[i] for i in top) >= alone - max(budget // LEAST_SHARE, 1)


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(0, 64), st.integers(1, 64), RANKS)
def test_among_equals_nothing_changes(remaining: list[int], budget: int, chunk: int, rank: Rank) -> None:
    ranks = [rank] * len(remaining)
    assert share_budget(remaining, ranks, budget, chunk) == plan_chunks(remaining, budget, chunk)
    assert share_budget(remaining, ranks, budget, chunk, packs=True) == pack_chunks(remaining, budget, chunk)
