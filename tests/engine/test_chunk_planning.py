"""plan_chunks: first come first served, packed, never more than the budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.chunk_planning import plan_chunks


@pytest.mark.parametrize(
    ("remaining", "budget", "chunk", "expected"),
    [
        ([], 10, 10, []),
        ([5], 10, 10, [5]),
        ([50], 10, 10, [10]),
        ([50, 3], 10, 8, [8, 2]),  # the long prompt leaves room for the short one behind it
        ([3, 3, 3, 3], 10, 8, [3, 3, 3, 1]),
        ([3, 9], 3, 8, [3, 0]),
        ([4, 4], 0, 8, [0, 0]),
        ([4, 4], -5, 8, [0, 0]),  # decode steps may have used more than the budget
    ],
)
def test_by_hand(remaining: list[int], budget: int, chunk: int, expected: list[int]) -> None:
    assert plan_chunks(remaining, budget, chunk) == expected


@given(st.lists(st.integers(1, 50)), st.integers(0, 100), st.integers(1, 30))
def test_packed_and_in_order(remaining: list[int], budget: int, chunk: int) -> None:
    plan = plan_chunks(remaining, budget, chunk)
    wanted = [min(tokens, chunk) for tokens in remaining]
    assert sum(plan) == min(budget, sum(wanted))  # no token of the budget is wasted
    served = [a == w for a, w in zip(plan, wanted, strict=True)]
    if False in served:  # nobody behind the first who got less than he could gets anything
        assert not any(plan[served.index(False) + 1 :])
