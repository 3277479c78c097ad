"""Whatever is asked at once, the fleet keeps a decode worker; and what a restart does to roles is told."""

import asyncio
from typing import Any

import msgspec
import pytest

from baton.core.errors import RequestError
from baton.core.messages import Message, NodeRef, Role, SetRoles, Status, WorkerInfo
from baton.gateway.elastic import RoleChange
from baton.gateway.membership import Membership
from baton.gateway.metrics import Metrics
from baton.gateway.role_table import FORGET_S, RoleTable

PREFILL, DECODE = (Role.PREFILL,), (Role.DECODE,)
BOTH = (Role.PREFILL, Role.DECODE)
STATUS = Status(*([0] * 15))


class Fleet:
    """Workers whose answers come when the test says so. Every message is kept."""

    def __init__(self, info: Any, rule: Any = None, **roles: tuple[Role, ...]) -> None:
        self.membership = Membership(NodeRef("gateway-0", 1), "", timeout_s=1e9)
        self.asked: list[tuple[NodeRef, SetRoles]] = []
        self.table = RoleTable(self.membership, self._send, Metrics(list), rule, clock=lambda: 0.0)
        self._info = info
        for name, first in roles.items():
            self.join(name, first)

    def join(self, name: str, first: tuple[Role, ...], incarnation: int = 1) -> None:
        info: WorkerInfo = self._info(name, ref=NodeRef(name, incarnation), roles=first)
        self.membership.hello(info, 0.0)
        self.table.worker_joined(info)

    def leave(self, name: str) -> None:
        worker = self.membership.workers.pop(NodeRef(name, 1))
        self.table.worker_left(worker.info)

    def _send(self, to: NodeRef, body: Message) -> bool:
        assert isinstance(body, SetRoles)
        self.asked.append((to, body))
        return True

    def answer(self) -> None:
        """All workers say that they have what they were asked to have."""
        for ref, body in self.asked:
            self.say(ref, body.roles)
        self.asked.clear()

    def say(self, ref: NodeRef, roles: tuple[Role, ...]) -> None:
        status = msgspec.structs.replace(STATUS, roles=roles)
        self.membership.heard(ref, status, 0.0)
        self.table.handle(ref, status)

    def change(self, *wanted: tuple[str, tuple[Role, ...]]) -> list[int]:
        """All at once; the workers answer when all have been asked. HTTP statuses."""

        async def one(name: str, roles: tuple[Role, ...]) -> int:
            try:
                await self.table.change(name, roles)
            except RequestError as error:
                return error.status
            return 200

        self.table._told = asyncio.Event()  # of the loop that runs now

        async def scenario() -> list[int]:
            tasks = [asyncio.create_task(one(*change)) for change in wanted]
            await asyncio.sleep(0)
            self.answer()
            return await asyncio.gather(*tasks)

        return asyncio.run(scenario())

    @property
    def roles(self) -> dict[str, tuple[Role, ...]]:
        return {ref.node_id: worker.roles for ref, worker in self.membership.workers.items()}


def test_of_many_changes_at_once_one_is_refused(hand_module: Any) -> None:
    fleet = Fleet(hand_module.decode_info, a=DECODE, b=DECODE, c=DECODE)
    assert fleet.change(("a", PREFILL), ("b", PREFILL), ("c", PREFILL)) == [200, 200, 409]
    assert fleet.roles == {"a": PREFILL, "b": PREFILL, "c": DECODE}


def test_a_role_that_was_only_asked_for_is_not_counted_on(hand_module: Any) -> None:
    """The one that is to take over might never answer."""
    fleet = Fleet(hand_module.decode_info, a=DECODE, b=PREFILL)
    assert fleet.change(("b", DECODE), ("a", PREFILL)) == [200, 409]
    assert fleet.change(("a", PREFILL)) == [200]
    assert fleet.roles == {"a": PREFILL, "b": DECODE}


def test_an_answer_that_is_late_is_still_counted_on(hand_module: Any) -> None:
    """A worker in a long step has not answered for longer than a client waits."""
    fleet = Fleet(hand_module.decode_info, a=DECODE, b=DECODE)
    fleet.table._tell(RoleChange(NodeRef("a", 1), PREFILL, "by hand"))
    fleet.table.tick(FORGET_S - 1)
    assert fleet.change(("b", PREFILL)) == [409]


def test_what_the_rule_wants_is_held_to_the_same(hand_module: Any) -> None:
    wanted = {name: RoleChange(NodeRef(name, 1), PREFILL, "the load") for name in ("a", "b")}
    turns = iter(("a", "b", "b"))
    fleet = Fleet(hand_module.decode_info, lambda now, masks: wanted[next(turns)], a=DECODE, b=DECODE)
    fleet.table.tick(0.0)
    fleet.table.tick(0.1)  # the rule has gone mad: it would leave none
    fleet.answer()
    fleet.table.tick(0.2)
    fleet.answer()
    assert fleet.roles == {"a": PREFILL, "b": DECODE}


def test_by_hand_while_the_rule_is_at_it(hand_module: Any) -> None:
    fleet = Fleet(
        hand_module.decode_info,
        lambda now, masks: (
            RoleChange(NodeRef("a", 1), PREFILL, "the load") if masks[NodeRef("a", 1)] == DECODE else None
        ),
        a=DECODE,
        b=DECODE,
    )
    fleet.table.tick(0.0)
    assert fleet.change(("b", PREFILL)) == [409]
    assert fleet.roles == {"a": PREFILL, "b": DECODE}


def test_two_gateways_take_the_last_two_at_once_and_both_come_back(hand_module: Any) -> None:
    fleet = Fleet(hand_module.decode_info, a=DECODE, b=DECODE, c=PREFILL)
    fleet.say(NodeRef("a", 1), PREFILL)  # another gateway
    fleet.say(NodeRef("b", 1), PREFILL)  # and another one
    fleet.table.tick(0.0)
    assert {ref.node_id: body.roles for ref, body in fleet.asked} == {"a": BOTH, "b": BOTH}
    fleet.table.tick(0.1)  # not asked twice
    assert len(fleet.asked) == 2
    fleet.answer()
    assert fleet.roles == {"a": BOTH, "b": BOTH, "c": PREFILL}
    assert {change["reason"] for change in fleet.table.changes} == {"no worker had the decode role any more"}


def test_the_only_decode_worker_dies_and_another_one_had_been_one(hand_module: Any) -> None:
    fleet = Fleet(hand_module.decode_info, a=DECODE, b=PREFILL)
    fleet.change(("b", DECODE))
    fleet.change(("a", PREFILL))
    fleet.leave("b")
    fleet.table.tick(0.0)
    fleet.answer()
    assert fleet.roles == {"a": BOTH}


def test_prefill_workers_that_come_first_stay_what_they_are(hand_module: Any) -> None:
    fleet = Fleet(hand_module.decode_info, a=PREFILL)
    fleet.table.tick(0.0)
    assert fleet.asked == []


@pytest.mark.parametrize("first", [DECODE, BOTH])
def test_a_restart_is_a_change_with_its_reason(hand_module: Any, first: tuple[Role, ...]) -> None:
    fleet = Fleet(hand_module.decode_info, a=first, b=DECODE)
    fleet.change(("a", PREFILL))
    fleet.leave("a")
    fleet.join("a", first, incarnation=2)
    old, new = fleet.table.changes
    assert (old["old"], old["new"]) == ("+".join(first), "prefill")
    assert (new["worker"], new["old"], new["new"]) == ("a", "prefill", "+".join(first))
    assert "started anew" in str(new["reason"])


def test_no_change_where_a_restart_changes_nothing(hand_module: Any) -> None:
    fleet = Fleet(hand_module.decode_info, a=DECODE)
    fleet.say(NodeRef("a", 1), DECODE)
    fleet.leave("a")
    fleet.join("a", DECODE, incarnation=2)
    assert fleet.table.changes == []


def test_who_was_only_silent_has_not_been_restarted(hand_module: Any) -> None:
    fleet = Fleet(hand_module.decode_info, a=DECODE, b=DECODE)
    fleet.change(("a", PREFILL))
    fleet.leave("a")
    fleet.join("a", DECODE)  # the same life; its next Status says what it is
    assert len(fleet.table.changes) == 1
