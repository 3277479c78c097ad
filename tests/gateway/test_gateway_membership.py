"""The table of workers, by literals: who is in, who is told what."""

from typing import Any

import pytest

from baton.core.messages import Beat, NodeRef, PeerJoined, PeerLeft, Refused, Role, Welcome, WhoAreYou
from baton.gateway.membership import Joined, Left, Membership, Rejected, Send

GATEWAY = NodeRef("gateway-0", 9)


@pytest.fixture
def table() -> Membership:
    return Membership(GATEWAY, "digest", 10.0)


@pytest.fixture
def info(world_module: Any) -> Any:
    return world_module.worker_info


def test_the_first_worker_is_welcomed(table: Membership, info: Any) -> None:
    one = info("decode-0", Role.DECODE)
    assert table.hello(one, 0.0) == [Send(one.ref, Welcome(GATEWAY, [])), Joined(one)]
    assert [w.info for w in table.with_role(Role.DECODE)] == [one]
    assert table.with_role(Role.PREFILL) == []


def test_peers_are_introduced_to_each_other(table: Membership, info: Any) -> None:
    one, two = info("decode-0", Role.DECODE), info("prefill-0", Role.PREFILL)
    table.hello(one, 0.0)
    assert table.hello(two, 1.0) == [
        Send(two.ref, Welcome(GATEWAY, [one])),
        Send(one.ref, PeerJoined(two)),
        Joined(two),
    ]


def test_the_same_hello_again_is_only_welcomed(table: Membership, info: Any) -> None:
    one, two = info("decode-0", Role.DECODE), info("prefill-0", Role.PREFILL)
    table.hello(one, 0.0)
    table.hello(two, 0.0)
    assert table.hello(two, 1.0) == [Send(two.ref, Welcome(GATEWAY, [one]))]


def test_the_next_life_replaces_the_one_before(table: Membership, info: Any) -> None:
    other, old = info("decode-0", Role.DECODE), info("prefill-0", Role.PREFILL, incarnation=1)
    new = info("prefill-0", Role.PREFILL, incarnation=2)
    table.hello(other, 0.0)
    table.hello(old, 0.0)
    assert table.hello(new, 1.0) == [
        Send(other.ref, PeerLeft(old.ref)),
        Left(old, "it was started anew"),
        Send(new.ref, Welcome(GATEWAY, [other])),
        Send(other.ref, PeerJoined(new)),
        Joined(new),
    ]
    # The old one, should it still live, cannot take the name back.
    refused, rejected = table.hello(old, 2.0)
    assert isinstance(refused, Send)
    assert isinstance(refused.message, Refused)
    assert "prefill-0" in refused.message.reason
    assert rejected == Rejected(old.ref, refused.message.reason)
    assert set(table.workers) == {other.ref, new.ref}


@pytest.mark.parametrize(("field", "word"), [("model_digest", "--dtype"), ("wire_digest", "layout")])
def test_misfits_are_refused(table: Membership, info: Any, field: str, word: str) -> None:
    table.hello(info("decode-0", Role.DECODE), 0.0)
    misfit = info("prefill-0", Role.PREFILL, **{field: "other"})
    refused, rejected = table.hello(misfit, 0.0)
    assert isinstance(refused, Send)
    assert isinstance(refused.message, Refused)
    assert word in refused.message.reason
    assert isinstance(rejected, Rejected)
    assert misfit.ref not in table.workers


def test_the_model_must_be_the_gateways(table: Membership, info: Any) -> None:
    assert isinstance(table.hello(info("decode-0", Role.DECODE, model_digest="other"), 0.0)[-1], Rejected)
    table.model_digest = ""
    assert isinstance(table.hello(info("decode-0", Role.DECODE, model_digest="other"), 0.0)[-1], Joined)


def test_a_lone_worker_may_come_back_with_another_layout(table: Membership, info: Any) -> None:
    table.hello(info("decode-0", Role.DECODE), 0.0)
    again = info("decode-0", Role.DECODE, incarnation=2, wire_digest="other")
    assert isinstance(table.hello(again, 1.0)[-1], Joined)


def test_strangers_are_asked_who_they_are(table: Membership, info: Any) -> None:
    stranger = NodeRef("decode-0", 3)
    assert table.heard(stranger, Beat(1, 0), 0.0) == [Send(stranger, WhoAreYou())]
    table.hello(info("decode-0", Role.DECODE, incarnation=3), 1.0)
    assert table.heard(stranger, Beat(2, 5), 2.0) == []
    assert table.workers[stranger].num_steps == 5


def test_silence_beyond_the_bound_ends_it(table: Membership, info: Any) -> None:
    one, two = info("decode-0", Role.DECODE), info("prefill-0", Role.PREFILL)
    table.hello(one, 0.0)
    table.hello(two, 0.0)
    table.heard(two.ref, Beat(1, 0), 9.0)
    assert table.expire(10.0) == []  # one slow answer is no death
    assert table.expire(10.1) == [Send(two.ref, PeerLeft(one.ref)), Left(one, "it was silent for 10 s")]
    assert table.expire(10.2) == []
    # It lives after all: asked who it is, it joins again under the same incarnation.
    assert table.heard(one.ref, Beat(9, 0), 11.0) == [Send(one.ref, WhoAreYou())]
    assert isinstance(table.hello(one, 11.0)[-1], Joined)


def test_goodbye_and_unreachable(table: Membership, info: Any) -> None:
    one, two = info("decode-0", Role.DECODE), info("prefill-0", Role.PREFILL)
    table.hello(one, 0.0)
    table.hello(two, 0.0)
    assert table.goodbye(two.ref) == [Send(one.ref, PeerLeft(two.ref)), Left(two, "it said goodbye")]
    assert table.goodbye(two.ref) == []
    assert table.unreachable(one.ref, "why") == [Left(one, "why")]
    assert table.unreachable(one.ref, "why") == []
    assert table.workers == {}
