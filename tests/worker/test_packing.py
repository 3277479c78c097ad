"""Length-aware packing: literals, and against first come, first served."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.chunk_planning import plan_chunks
from baton.worker.packing import pack_chunks


@pytest.mark.parametrize(
    ("remaining", "plan"),
    [
        ([10, 3], [5, 3]),  # the long one needs two steps in any case
        ([10, 6, 3], [2, 6, 0]),  # the 3 would have to wait for a third step in any case
        ([10, 7], [8, 0]),  # 7 beside the 10 would make that need three steps
        ([3, 10, 4], [3, 5, 0]),
        ([3, 10, 2], [3, 3, 2]),
        ([20, 1, 1, 1, 1], [4, 1, 1, 1, 1]),
        ([16, 1], [8, 0]),  # two full steps
        ([2, 3], [2, 3]),
        ([], []),
    ],
)
def test_a_later_prompt_fills_what_an_earlier_one_does_not_need(remaining: list[int], plan: list[int]) -> None:
    assert pack_chunks(remaining, 8, 8) == plan


def test_chunks_smaller_than_the_budget_share_it_anyway() -> None:
    assert pack_chunks([10, 3, 9], 8, 4) == plan_chunks([10, 3, 9], 8, 4)


def test_sc05_newcomers_move_beside_one_that_uses_the_whole_budget() -> None:
    """A hog in chunked prefill must not keep everybody else out until it ends (vllm-project/vllm #53130)."""
    assert pack_chunks([1000, 3, 4], 128, 128)[1:] == [3, 4]
    assert pack_chunks([1024, 3, 4], 128, 64) == [64, 3, 4]


def completions(remaining: list[int], budget: int, first_plan: list[int]) -> list[int]:
    """The step in which each prompt is complete: the first one as planned, the others in order."""
    left, done, step, plan = list(remaining), [0] * len(remaining), 0, first_plan
    while any(left):
        step += 1
        for index, tokens in enumerate(plan):
            left[index] -= tokens
            if left[index] == 0 and not done[index]:
                done[index] = step
        plan = plan_chunks(left, budget, budget)
    return done


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=8), st.integers(1, 24))
def test_nobody_is_complete_later_than_in_order(remaining: list[int], budget: int) -> None:
    in_order, packed = plan_chunks(remaining, budget, budget), pack_chunks(remaining, budget, budget)
    assert sum(packed) == sum(in_order)
    assert all(0 <= tokens <= left for tokens, left in zip(packed, remaining, strict=True))
    before, after = completions(remaining, budget, in_order), completions(remaining, budget, packed)
    assert all(now <= then for now, then in zip(after, before, strict=True))
