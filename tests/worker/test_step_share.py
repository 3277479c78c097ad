"""StepShare: prefill steps beside decodes are as short as the decode side says; without decodes they are not."""

from hypothesis import given
from hypothesis import strategies as st

from baton.worker.step_share import StepShare


def test_by_hand() -> None:
    share = StepShare()
    assert share.limited(512) == 512
    share.planned(num_decodes=3, prompt_budget=64, num_prompt_tokens=0)
    assert share.limited(512) == 64
    assert share.limited(40) == 40
    share.planned(num_decodes=3, prompt_budget=64, num_prompt_tokens=40)
    assert share.limited(512) == 24
    share.planned(num_decodes=3, prompt_budget=64, num_prompt_tokens=64)
    assert share.limited(512) == 16, "a quarter is left: neither role starves"
    share.planned(num_decodes=0, prompt_budget=64, num_prompt_tokens=64)
    assert share.limited(512) == 512


@given(st.integers(0, 300), st.integers(0, 4096), st.integers(0, 4096), st.integers(1, 9000))
def test_there_is_always_something_to_compute_and_never_more_than_alone(decodes, budget, own, alone) -> None:
    share = StepShare()
    share.planned(decodes, budget, min(own, budget))
    assert 1 <= share.limited(alone) <= alone
