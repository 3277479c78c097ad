"""What cannot work as it was meant is said in the log, once, with the numbers."""

import logging
from typing import Any

import pytest
from msgspec.structs import replace

from baton.core.messages import NodeRef, Role
from baton.core.queueing import FAIR, FCFS
from baton.core.step_cost import StepCost
from baton.gateway.membership import Membership
from baton.gateway.settings_check import Settings, SettingsCheck

# 10 ms a step, 1 ms a prompt token, 5 ms a sequence that decodes.
COST = StepCost(0.010, 0.001, 0.0, 0.005, 0.0, 100, 0.1, 100, 100)
SETTINGS = Settings(FAIR, 0.5, 0.05)


class Checked:
    """One worker with both roles, which `says` what it has learned."""

    def __init__(self, hand_module: Any, settings: Settings = SETTINGS, *roles: Role) -> None:
        self.membership = Membership(NodeRef("gateway-0", 1), "", timeout_s=1e9)
        self.prompt_tokens: float | None = None
        self.check = SettingsCheck(self.membership, settings, lambda now: self.prompt_tokens)
        self._status = hand_module.status()
        self._info = replace(hand_module.decode_info(), roles=roles or tuple(Role))
        self.now = 0.0
        self.join()

    def join(self, **changes: Any) -> None:
        self.info = replace(self._info, **changes)
        self.membership.hello(self.info, 0.0)
        self.check.worker_joined(self.info)

    def says(self, cost: StepCost) -> None:
        self.membership.heard(self.info.ref, replace(self._status, step_cost=cost), 0.0)
        self.now += 1.0
        self.check.tick(self.now)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING)

    def read() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    return read


def warnings_of(said: Any, hand_module: Any, ttft_s: float | None, tpot_s: float | None, tokens: float | None) -> Any:
    checked = Checked(hand_module, Settings(FCFS, ttft_s, tpot_s))
    checked.prompt_tokens = tokens
    said()
    checked.says(COST)
    return said()


def test_targets_that_can_be_kept_are_not_mentioned(hand_module: Any, said: Any) -> None:
    assert warnings_of(said, hand_module, 0.027, 0.016, None) == []
    assert warnings_of(said, hand_module, 0.111, None, 100.0) == []
    assert warnings_of(said, hand_module, None, None, 100.0) == []


def test_a_tpot_target_below_a_step_of_one(hand_module: Any, said: Any) -> None:
    [text] = warnings_of(said, hand_module, None, 0.014, None)
    assert "decode-0 cannot keep --tpot-target 14ms" in text
    assert "one sequence alone takes 15ms" in text
    assert "Give a target well above" in text


def test_a_ttft_target_below_a_prompt_alone(hand_module: Any, said: Any) -> None:
    [text] = warnings_of(said, hand_module, 0.025, None, None)
    assert "--ttft-target 25ms: even a short prompt of 16 tokens alone takes 26ms" in text
    [text] = warnings_of(said, hand_module, 0.1, None, 100.0)
    assert "--ttft-target 100ms: a typical prompt of 100 tokens alone takes 110ms" in text


def test_it_is_said_once_a_worker_and_when_the_cost_is_known(hand_module: Any, said: Any) -> None:
    checked = Checked(hand_module, Settings(FCFS, 0.001, 0.001))
    said()
    checked.says(replace(COST, num_samples=29))
    assert said() == []
    checked.says(COST)
    assert len(said()) == 2
    checked.says(COST)
    assert said() == []
    checked.membership.workers.clear()
    checked.check.worker_left(checked.info)
    checked.join(ref=NodeRef("decode-0", 2))
    said()
    checked.says(COST)
    assert len(said()) == 2, "another life of it"


def test_a_decode_worker_is_not_blamed_for_prompts_of_others(hand_module: Any, said: Any) -> None:
    checked = Checked(hand_module, Settings(FCFS, 0.001, None), Role.DECODE)
    prefill = replace(hand_module.decode_info("prefill-0"), roles=(Role.PREFILL,))
    checked.membership.hello(prefill, 0.0)
    said()
    checked.says(COST)
    assert said() == []
    del checked.membership.workers[prefill.ref]
    checked.says(COST)
    assert len(said()) == 1, "now it computes them"


def test_a_worker_with_other_settings_is_told_of_when_it_joins(hand_module: Any, said: Any) -> None:
    checked = Checked(hand_module)
    [text] = said()
    assert "decode-0 was started with --policy fcfs (here fair), --ttft-target none (here 500ms)" in text
    assert "--tpot-target none (here 50ms)" in text
    assert "Start it with the same flags" in text
    checked.join(ref=NodeRef("decode-1", 1), policy=FAIR, targets_s=(0.5, 0.05))
    assert said() == []


def test_a_gateway_checks_who_joins(in_world: Any, said: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        assert len([text for text in said() if "--policy fcfs (here fair)" in text]) == 2

    in_world(scenario, policy=FAIR)
