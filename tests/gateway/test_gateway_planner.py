"""Planner: workers are divided as the mix of prompts and answers needs it, and do not swing with what is short."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.messages import NodeRef, Role
from baton.core.step_cost import StepCost
from baton.gateway.capacity import Machine, Mix, Outlook, Targets
from baton.gateway.elastic import RoleChange
from baton.gateway.forecast import rest_of_prompt
from baton.gateway.measuring import Measuring
from baton.gateway.planner import LOOK_S, Planner

PREFILL, DECODE = (Role.PREFILL,), (Role.DECODE,)
BOTH = (Role.PREFILL, Role.DECODE)
MACHINE = Machine(StepCost(0.010, 0.0001, 0.0, 0.001, 0.0), 0.5, 2048, 10**6)
TARGETS = Targets(1.0, 0.015)
LONG_PROMPTS, LONG_ANSWERS, QUIET = (500, 20), (50, 200), None
RATE = 4
NOTHING = Mix((), (1.0,))


class Fleet:
    """Workers that do at once what they are told, under requests of some lengths."""

    def __init__(self, *masks: tuple[Role, ...], targets: Targets = TARGETS):
        self.planner, self.measuring, self.now = Planner(), Measuring(targets.tpot_s), 0.0
        self.masks = {NodeRef(f"w{i}", 1): mask for i, mask in enumerate(masks)}
        self.changes: list[tuple[float, RoleChange]] = []
        self._targets = targets

    def run(self, seconds: float, lengths: tuple[int, int] | None) -> None:
        until = self.now + seconds
        while self.now < until:
            if lengths is not QUIET:
                self.measuring.sent(rest_of_prompt(lengths[0], lengths[0]), lengths[0], self.now)
                self.measuring.answered(lengths[1], self.now)
            change = self.planner.update(self.now, self.masks, self._outlook)
            if change is not None:
                assert change.roles != self.masks[change.worker]
                self.masks[change.worker] = change.roles
                assert any(Role.DECODE in mask for mask in self.masks.values()), "nobody decodes"
                self.changes.append((self.now, change))
            self.now += 1 / RATE

    def _outlook(self, now: float) -> Outlook | None:
        mix = self.measuring.mix(now)
        return None if mix is None else Outlook(mix, MACHINE, self._targets)

    @property
    def num_prefill(self) -> int:
        return sum(mask == PREFILL for mask in self.masks.values())


def test_with_long_answers_the_prefill_worker_decodes_and_with_long_prompts_it_does_not() -> None:
    fleet = Fleet(PREFILL, DECODE)
    fleet.run(60, LONG_PROMPTS)
    assert not fleet.changes
    fleet = Fleet(PREFILL, DECODE)
    fleet.run(60, LONG_ANSWERS)
    ((at, change),) = fleet.changes
    assert (at, change.worker.node_id, change.roles) == (4.0, "w0", DECODE)  # 2 s for 8 prompts, one more look
    assert change.reason.startswith("0 prefill + 2 decode are predicted to keep both targets up to ")
    fleet.run(60, LONG_PROMPTS)
    assert fleet.num_prefill == 1, "and back"
    assert len(fleet.changes) == 2


def test_the_worker_that_is_named_first_changes() -> None:
    fleet = Fleet(DECODE, PREFILL, PREFILL)
    fleet.run(12, LONG_ANSWERS)
    assert [change.worker.node_id for _, change in fleet.changes] == ["w1"]
    fleet.run(20, LONG_ANSWERS)
    assert [change.worker.node_id for _, change in fleet.changes] == ["w1", "w2"]
    (first, _), (second, _) = fleet.changes
    assert second - first == 10.0


def test_few_requests_say_nothing() -> None:
    fleet = Fleet(PREFILL, DECODE)
    for _ in range(60):
        fleet.run(0.25, LONG_ANSWERS)
        fleet.run(150.0, QUIET)
    assert not fleet.changes


def change_after_s(monkeypatch: pytest.MonkeyPatch, gains: list[float]) -> int | None:
    """Of two decode workers over the present division, look by look: when the prefill worker becomes one."""
    planner, masks = Planner(), {NodeRef("w0", 1): PREFILL, NodeRef("w1", 1): DECODE}
    monkeypatch.setattr("baton.gateway.planner.idle_share", lambda *_: 1.0)
    for look, gain in enumerate(gains):
        monkeypatch.setattr(
            "baton.gateway.planner.capacity",
            lambda num_prefill, *_, gain=gain: 1.0 if num_prefill else 1.0 + gain,
        )
        seen = Outlook(NOTHING, MACHINE, TARGETS, overhead_s=gain)
        if planner.update(LOOK_S * look, masks, lambda now, seen=seen: seen) is not None:
            return round(LOOK_S * look)
    return None


@pytest.mark.parametrize(("gain", "seconds"), [(0.04, None), (0.07, 8), (0.12, 6), (0.13, 4), (0.3, 2), (50.0, 2)])
def test_the_more_is_lost_the_sooner_a_role_changes(
    monkeypatch: pytest.MonkeyPatch, gain: float, seconds: int | None
) -> None:
    """When half a second's worth of work would have been saved; never at a single look."""
    assert change_after_s(monkeypatch, [gain] * 20) == seconds


def test_a_break_starts_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert change_after_s(monkeypatch, [0.12] * 3 + [0.0] + [0.12] * 3) is None
    assert change_after_s(monkeypatch, [0.12] * 3 + [0.0] + [0.12] * 6) == 14


def test_what_is_better_by_a_few_long_prompts_alone_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decode workers take twice as much where exactly 0.9 are to be kept, and no more where 0.87 are."""
    planner, masks = Planner(), {NodeRef("w0", 1): PREFILL, NodeRef("w1", 1): DECODE}
    monkeypatch.setattr("baton.gateway.planner.idle_share", lambda *_: 1.0)
    monkeypatch.setattr(
        "baton.gateway.planner.capacity",
        lambda num_prefill, _1, _2, kept: 2.0 if kept == 0.9 and not num_prefill else 1.0,
    )
    seen = Outlook(NOTHING, MACHINE, TARGETS)
    assert all(planner.update(LOOK_S * look, masks, lambda now: seen) is None for look in range(20))


@pytest.mark.parametrize(("error", "does_change"), [(0.0, True), (0.16, True), (0.17, False)])
def test_a_gain_must_be_beyond_what_the_mix_can_be_mistaken_by(
    monkeypatch: pytest.MonkeyPatch, error: float, does_change: bool
) -> None:
    """0.05 and one and a half standard errors are less than 0.3 up to an error of 1/6."""
    planner, masks = Planner(), {NodeRef("w0", 1): PREFILL, NodeRef("w1", 1): DECODE}
    monkeypatch.setattr("baton.gateway.planner.idle_share", lambda *_: 1.0)
    monkeypatch.setattr("baton.gateway.planner.capacity", lambda num_prefill, *_: 1.0 if num_prefill else 1.3)
    seen = Outlook(NOTHING._replace(error=error), MACHINE, TARGETS)
    changes = [planner.update(LOOK_S * look, masks, lambda now: seen) for look in range(3)]
    assert any(changes) is does_change


@pytest.mark.parametrize(
    ("num_prefill", "capacities", "first"),
    [
        (2, {0: 18.0, 1: 9.0, 2: 10.0, 3: 8.0}, DECODE),  # over what is worse than both
        (2, {0: 8.0, 1: 9.0, 2: 10.0, 3: 15.0}, PREFILL),
        (1, {0: 8.0, 1: 10.0, 2: 9.0, 3: 15.0}, PREFILL),
        (3, {0: 18.0, 1: 9.0, 2: 9.0, 3: 10.0}, DECODE),  # however far it is to none
        (2, {0: 10.0, 1: 9.0, 2: 10.0, 3: 10.3}, None),
    ],
)
def test_a_worker_changes_towards_what_is_best(
    monkeypatch: pytest.MonkeyPatch, num_prefill: int, capacities: dict[int, float], first: tuple[Role, ...] | None
) -> None:
    masks = {NodeRef(f"w{i}", 1): PREFILL if i < num_prefill else DECODE for i in range(4)}
    planner, seen = Planner(), Outlook(NOTHING, MACHINE, TARGETS)
    monkeypatch.setattr("baton.gateway.planner.idle_share", lambda *_: 1.0)
    monkeypatch.setattr("baton.gateway.planner.capacity", lambda num_prefill, *_: capacities[num_prefill])
    changes = [planner.update(LOOK_S * look, masks, lambda now: seen) for look in range(5)]
    assert next((change.roles for change in changes if change), None) == first


@pytest.mark.slow
@pytest.mark.parametrize("targets", [Targets(0.6, 0.03), Targets(0.6, 0.04)])
def test_a_steady_mix_of_very_unlike_prompts_does_not_make_roles_swing(targets: Targets) -> None:
    """Both divisions take about as much of them; a request each 2 s says little, for ten minutes."""
    generator = random.Random(1)
    fleet = Fleet(PREFILL, DECODE, targets=targets)
    for _ in range(300):
        prompt, answer = generator.lognormvariate(7.2, 0.95), generator.lognormvariate(2.8, 0.8)
        fleet.run(0.25, (int(min(prompt, 7000)) + 1, int(min(answer, 300)) + 1))
        fleet.run(1.75, QUIET)
    assert len(fleet.changes) <= 1


def test_where_fewer_than_nine_tenths_can_keep_the_targets_nearly_as_many_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr("baton.gateway.planner.idle_share", lambda *_: 0.5)
    monkeypatch.setattr("baton.gateway.planner.capacity", lambda *args: asked.append(args[3]) or 1.0)
    masks = {NodeRef("w0", 1): PREFILL, NodeRef("w1", 1): DECODE}
    planner, seen = Planner(), Outlook(NOTHING, MACHINE, TARGETS)
    for look in range(5):
        assert planner.update(LOOK_S * look, masks, lambda now: seen) is None
    assert asked == [0.485, 0.485], "two divisions, and once only while nothing is seen anew"


def test_targets_that_no_division_keeps_change_nothing() -> None:
    fleet = Fleet(PREFILL, DECODE, targets=Targets(0.001, 0.001))
    fleet.run(60, LONG_ANSWERS)
    assert not fleet.changes


def test_prompts_that_are_too_long_for_the_target_on_any_worker_decide_nothing() -> None:
    """A fifth of them takes more than the 50 ms there are: what counts is whether the others keep them."""
    fleet = Fleet(PREFILL, DECODE, targets=Targets(0.05, 0.015))
    for _ in range(12):
        fleet.run(4.0, LONG_ANSWERS)
        fleet.run(1.0, (500, 200))
    assert fleet.num_prefill == 0


def test_both_roles_given_by_hand_are_left_alone() -> None:
    fleet = Fleet(BOTH, BOTH)
    fleet.run(60, LONG_PROMPTS)
    fleet.run(60, LONG_ANSWERS)
    assert not fleet.changes


@pytest.mark.slow
@pytest.mark.parametrize("period_s", [2, 20, 60, 300])
@pytest.mark.parametrize("other", [LONG_PROMPTS, QUIET], ids=["to and fro", "bursts"])
def test_alternating_load_does_not_make_roles_swing(period_s: int, other: tuple[int, int] | None) -> None:
    fleet = Fleet(PREFILL, DECODE)
    num_periods = max(2, 900 // period_s)
    for _ in range(num_periods):
        fleet.run(period_s / 2, LONG_ANSWERS)
        fleet.run(period_s / 2, other)
    times = [at for at, _ in fleet.changes]
    assert all(later - at >= 30.0 for at, later in pairwise(times)), "to and fro within half a minute"
    assert len(fleet.changes) <= 2 * num_periods
    if period_s <= 20 or other is QUIET:
        assert len(fleet.changes) <= 1, "it is the mix that counts"
    if period_s == 300 and other is LONG_PROMPTS:
        assert len(fleet.changes) == 2 * num_periods, "it follows a slow change"


masks = st.lists(st.sampled_from([PREFILL, DECODE, BOTH]), min_size=1, max_size=5)
lengths = st.sampled_from([LONG_PROMPTS, LONG_ANSWERS, QUIET])


@settings(max_examples=8, deadline=None)
@given(masks, st.lists(st.tuples(st.floats(1, 60), lengths), max_size=6))
def test_somebody_always_decodes_and_changes_are_ten_seconds_apart(first, story) -> None:
    fleet = Fleet(*first)
    if all(mask == PREFILL for mask in first):
        fleet.masks[NodeRef("w0", 1)] = DECODE
    for seconds, now_lengths in story:
        fleet.run(seconds, now_lengths)
    assert all(later - at >= 10.0 for (at, _), (later, _) in pairwise(fleet.changes))
    assert all(fleet.masks[NodeRef(f"w{i}", 1)] == BOTH for i, mask in enumerate(first) if mask == BOTH)
