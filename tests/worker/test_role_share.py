"""StepShare: prefill steps beside decodes are as short as the decode side says; without decodes they are not."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import LEAST_SAMPLES, StepCost, StepShape
from baton.worker.step_share import StepShare

UNKNOWN = StepCost(0.02, 0.001, 0.0, 0.0005, 0.0)
KNOWN = StepCost(0.02, 0.001, 0.0, 0.0005, 0.0, LEAST_SAMPLES, 0.1, LEAST_SAMPLES, LEAST_SAMPLES)


def test_by_hand() -> None:
    share = StepShare()
    assert share.limited(512, KNOWN) == 512
    share.planned(num_decodes=3, prompt_budget=64, num_prompt_tokens=0)
    assert share.limited(512, KNOWN) == 64
    assert share.limited(40, KNOWN) == 40
    share.planned(num_decodes=3, prompt_budget=64, num_prompt_tokens=40)
    assert share.limited(512, KNOWN) == 24
    share.planned(num_decodes=3, prompt_budget=64, num_prompt_tokens=64)
    assert share.limited(512, KNOWN) == 16, "a quarter is left: neither role starves"
    share.planned(num_decodes=0, prompt_budget=64, num_prompt_tokens=64)
    assert share.limited(512, KNOWN) == 512


def test_with_a_target_a_turn_takes_no_longer_than_a_mixed_step_would() -> None:
    share = StepShare(has_target=True)
    share.planned(num_decodes=3, prompt_budget=64, num_prompt_tokens=10)
    assert share.limited(512, UNKNOWN) == 54
    tokens = share.limited(512, KNOWN)
    assert tokens == 54 - 20
    turn_s = KNOWN.seconds(StepShape(10, 0.0, 3)) + KNOWN.seconds(StepShape(tokens))
    assert turn_s <= KNOWN.seconds(StepShape(64, 0.0, 3)) + 1e-9
    share.planned(num_decodes=3, prompt_budget=20, num_prompt_tokens=10)
    assert share.limited(512, KNOWN) == 5


@given(st.integers(0, 300), st.integers(0, 4096), st.integers(0, 4096), st.integers(1, 9000), st.booleans())
def test_there_is_always_something_to_compute_and_never_more_than_alone(decodes, budget, own, alone, target) -> None:
    share = StepShare(has_target=target)
    share.planned(decodes, budget, min(own, budget))
    assert 1 <= share.limited(alone, KNOWN) <= alone
