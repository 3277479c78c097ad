"""RoleShare: prefill steps beside decodes are as short as the decode side says; prompts leave it blocks."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import LEAST_SAMPLES, StepCost, StepShape
from baton.worker.role_share import PATIENCE_S, RoleShare

UNKNOWN = StepCost(0.02, 0.001, 0.0, 0.0005, 0.0)
KNOWN = StepCost(0.02, 0.001, 0.0, 0.0005, 0.0, LEAST_SAMPLES, 0.1, LEAST_SAMPLES, LEAST_SAMPLES)


def test_by_hand() -> None:
    share = RoleShare(64)
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
    share = RoleShare(64, has_target=True)
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
    share = RoleShare(64, has_target=target)
    share.planned(decodes, budget, min(own, budget))
    assert 1 <= share.limited(alone, KNOWN) <= alone


def test_with_both_roles_prompts_hold_half_of_the_pool_or_one_prompt() -> None:
    share = RoleShare(64)
    assert share.may_hold(50, 14)
    share.has_both_roles = True
    assert share.may_hold(20, 12)
    assert not share.may_hold(20, 13)
    assert share.may_hold(0, 60), "a long prompt is computed alone, not never"


def test_a_hand_over_is_given_up_only_while_nothing_that_runs_ends_by_itself() -> None:
    share = RoleShare(64)
    assert not share.must_give_up(100.0)
    share.decode_patience.waits(100.0, others_end=False)
    share.decode_patience.waits(100.5, others_end=False)
    assert not share.must_give_up(100.0 + PATIENCE_S - 0.01)
    assert share.must_give_up(100.0 + PATIENCE_S)
    assert not share.must_give_up(100.1 + PATIENCE_S), "one at a time"
    assert share.must_give_up(100.0 + 2 * PATIENCE_S)
    share.decode_patience.waits(110.0, others_end=True)
    assert not share.must_give_up(120.0)
    share.decode_patience.waits(120.0, others_end=False)
    share.decode_patience.waits_no_more()
    assert not share.must_give_up(130.0)
    share.prefill_patience.waits(130.0, others_end=False)
    assert share.must_give_up(130.0 + PATIENCE_S)
