"""Elastic: roles follow a load that lasts, and do not swing with one that does not."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.messages import NodeRef, Role
from baton.gateway.elastic import Elastic, PoolWaits, RoleChange

PREFILL, DECODE = Role.PREFILL, Role.DECODE
BOTH = (PREFILL, DECODE)
TICK_S = 0.25
SHORT_OF_PREFILL, SHORT_OF_DECODE, EVEN = PoolWaits(4.0, 0.1), PoolWaits(0.1, 4.0), PoolWaits(0.1, 0.1)


class Fleet:
    """Workers that do at once what they are told."""

    def __init__(self, num_prefill: int = 1, num_decode: int = 2, target_s: float | None = None):
        self.elastic = Elastic(target_s)
        self.now = 0.0
        self.own = {NodeRef(f"p{i}", 1): (PREFILL,) for i in range(num_prefill)}
        self.own |= {NodeRef(f"d{i}", 1): (DECODE,) for i in range(num_decode)}
        self.masks = dict(self.own)
        self.changes: list[tuple[float, RoleChange]] = []

    def run(self, seconds: float, waits: PoolWaits) -> None:
        until = self.now + seconds
        while self.now < until:
            change = self.elastic.update(self.now, waits, self.masks)
            if change is not None:
                assert change.roles != self.masks[change.worker]
                pools = self.pools
                self.masks[change.worker] = change.roles
                assert self.pools >= pools, "a pool was emptied"
                self.changes.append((self.now, change))
            self.now += TICK_S

    @property
    def pools(self) -> set[Role]:
        """Those that somebody is in."""
        return {role for mask in self.masks.values() for role in mask}

    def helping(self, role: Role) -> int:
        return sum(role in mask and role not in self.own[ref] for ref, mask in self.masks.items())


def test_a_decode_worker_helps_after_five_seconds_and_stops_after_thirty_calm_ones() -> None:
    fleet = Fleet()
    fleet.run(14, SHORT_OF_PREFILL)
    assert [(at, c.worker.node_id, c.roles) for at, c in fleet.changes] == [(5.0, "d0", BOTH)]
    assert "predicted wait of 4.00 s" in fleet.changes[0][1].reason
    fleet.run(60, EVEN)
    at, change = fleet.changes[1]
    assert (at, change.worker.node_id, change.roles) == (13.75 + 30, "d0", (DECODE,))
    assert len(fleet.changes) == 2


def test_a_prefill_worker_helps_the_decode_pool_too() -> None:
    fleet = Fleet()
    fleet.run(6, SHORT_OF_DECODE)
    assert fleet.masks[NodeRef("p0", 1)] == BOTH


@pytest.mark.parametrize(
    ("waits", "target_s", "helps"),
    [
        ((0.6, 0.0), None, True),
        ((0.4, 0.0), None, False),  # under half a second
        ((0.4, 0.0), 1.0, True),  # a quarter of the target is enough
        ((2.0, 1.1), 1.0, False),  # less than twice as long
    ],
)
def test_how_short_is_short(waits: tuple[float, float], target_s: float | None, helps: bool) -> None:
    fleet = Fleet(target_s=target_s)
    fleet.run(20, PoolWaits(*waits))
    assert bool(fleet.changes) is helps


def test_one_worker_after_the_other_helps_ten_seconds_apart_who_is_named_first_first() -> None:
    fleet = Fleet(1, 3)
    fleet.run(60, SHORT_OF_PREFILL)
    assert [(at, c.worker.node_id) for at, c in fleet.changes] == [(5.0, "d0"), (15.0, "d1"), (25.0, "d2")]
    assert all(DECODE in mask for ref, mask in fleet.masks.items() if ref.node_id.startswith("d"))


def test_a_break_starts_the_five_seconds_anew() -> None:
    fleet = Fleet()
    for _ in range(20):
        fleet.run(4.5, SHORT_OF_PREFILL)
        fleet.run(TICK_S, EVEN)
    assert not fleet.changes


def test_a_helper_that_is_left_alone_goes_on() -> None:
    fleet = Fleet(1, 1)
    fleet.run(10, SHORT_OF_DECODE)
    del fleet.masks[NodeRef("d0", 1)]
    fleet.run(300, EVEN)
    assert fleet.masks == {NodeRef("p0", 1): BOTH}
    fleet.masks[NodeRef("d0", 2)] = (DECODE,)
    fleet.run(60, EVEN)
    assert fleet.masks[NodeRef("p0", 1)] == (PREFILL,)


def test_the_only_decode_worker_does_not_prefill_for_nobody() -> None:
    fleet = Fleet(2, 1)
    fleet.run(60, SHORT_OF_PREFILL)
    assert not fleet.changes
    fleet.run(60, SHORT_OF_DECODE)
    assert fleet.helping(DECODE) == 2


def test_a_pool_that_has_no_worker_gets_none() -> None:
    fleet = Fleet(0, 2)
    fleet.run(60, SHORT_OF_PREFILL)
    assert not fleet.changes


def test_roles_given_by_hand_are_left_alone() -> None:
    fleet = Fleet()
    fleet.run(6, SHORT_OF_PREFILL)
    fleet.masks[NodeRef("d0", 1)] = (DECODE,)  # by hand
    fleet.masks[NodeRef("p0", 1)] = BOTH  # by hand
    fleet.run(200, EVEN)
    assert len(fleet.changes) == 1


@pytest.mark.parametrize("period_s", [2, 20, 60, 300])
@pytest.mark.parametrize("quiet", [EVEN, SHORT_OF_DECODE], ids=["bursts", "to and fro"])
def test_alternating_load_does_not_make_roles_swing(period_s: int, quiet: PoolWaits) -> None:
    num_periods = max(2, 1800 // period_s)
    fleet = Fleet(2, 2)
    helped_at_the_end = []
    for _ in range(num_periods):
        fleet.run(period_s / 2, SHORT_OF_PREFILL)
        helped_at_the_end.append(fleet.helping(PREFILL))
        fleet.run(period_s / 2, quiet)
    for ref in fleet.masks:
        flips = sum(change.worker == ref for _, change in fleet.changes)
        assert flips <= 2 * num_periods, f"{flips} flips of {ref.node_id} in {num_periods} periods"
    times = [at for at, _ in fleet.changes]
    assert all(later - at >= 10.0 for at, later in pairwise(times)), "over 6 a minute"
    if period_s == 2:
        assert not fleet.changes
    if period_s == 20:
        assert len(fleet.changes) <= num_periods + 1
    if period_s == 300:
        assert helped_at_the_end == [2] * num_periods, "it follows a slow load"
        assert fleet.helping(PREFILL) == 0, "and lets go"


def test_one_that_is_missed_soon_again_is_kept_longer() -> None:
    """A pool that needs its helper all the time is even while it has it: taking it back must not go on for ever."""
    fleet = Fleet(1, 2)
    for _ in range(3600):
        fleet.run(1, EVEN if fleet.helping(PREFILL) else SHORT_OF_PREFILL)
    assert fleet.helping(PREFILL) == 1
    last_hour = [at for at, _ in fleet.changes if at > 1800]
    assert len(last_hour) <= 8


waits = st.tuples(st.sampled_from([0.0, 0.2, 1.0, 9.0]), st.sampled_from([0.0, 0.2, 1.0, 9.0])).map(
    lambda w: PoolWaits(*w)
)


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.floats(0.5, 60), waits, st.sampled_from(["", "leave", "back"])), max_size=25),
)
def test_no_pool_is_ever_emptied_and_nobody_loses_its_own_role(num_prefill: int, num_decode: int, story) -> None:
    fleet = Fleet(num_prefill, num_decode)
    for seconds, now_waits, event in story:
        fleet.run(seconds, now_waits)
        if event == "leave" and len(fleet.masks) > 1:
            del fleet.masks[next(iter(fleet.masks))]
        elif event == "back":
            fleet.masks = {**fleet.own, **fleet.masks}
        for ref, mask in fleet.masks.items():
            assert set(fleet.own[ref]) <= set(mask)
