"""A worker's view of gateways and peers, by literals."""

from baton.core.messages import Beat, NodeRef, PeerJoined, PeerLeft, Role, Welcome, WorkerInfo
from baton.worker.membership import GATEWAY_SILENCE_S, Changes, Membership

GATEWAY, REBORN = NodeRef("gateway-0", 1), NodeRef("gateway-0", 2)


def worker(name: str, incarnation: int = 1) -> WorkerInfo:
    return WorkerInfo(
        NodeRef(name, incarnation), (Role.PREFILL,), 1, "cpu", "m", "d", "w", "h", ("ipc://x",), 16, 8, 128, 4, 1
    )


def test_welcome_brings_a_gateway_and_its_peers() -> None:
    membership = Membership()
    changes = membership.handle(GATEWAY, Welcome(GATEWAY, [worker("p")]), 0.0)
    assert changes == Changes(joined=(worker("p"),), welcomed_by=GATEWAY)
    assert membership.is_gateway(GATEWAY)
    assert membership.knows(NodeRef("p", 1))
    assert not membership.knows(None)


def test_a_second_welcome_brings_no_peer_twice() -> None:
    membership = Membership()
    membership.handle(GATEWAY, Welcome(GATEWAY, [worker("p")]), 0.0)
    assert membership.handle(GATEWAY, Welcome(GATEWAY, [worker("p")]), 1.0) == Changes(welcomed_by=GATEWAY)


def test_a_peer_that_comes_back_as_another_life_replaces_the_old_one() -> None:
    membership = Membership()
    membership.handle(GATEWAY, Welcome(GATEWAY, [worker("p")]), 0.0)
    changes = membership.handle(GATEWAY, PeerJoined(worker("p", 2)), 1.0)
    assert changes == Changes(joined=(worker("p", 2),), left=(NodeRef("p", 1),))
    assert not membership.knows(NodeRef("p", 1))


def test_news_of_an_old_life_is_ignored() -> None:
    membership = Membership()
    membership.handle(GATEWAY, Welcome(GATEWAY, [worker("p", 2)]), 0.0)
    assert membership.handle(GATEWAY, PeerLeft(NodeRef("p", 1)), 1.0) == Changes()
    assert membership.handle(GATEWAY, PeerLeft(NodeRef("p", 2)), 1.0) == Changes(left=(NodeRef("p", 2),))


def test_a_gateway_that_restarts_is_lost_and_new_at_once_but_its_peers_stay() -> None:
    membership = Membership()
    membership.handle(GATEWAY, Welcome(GATEWAY, [worker("p")]), 0.0)
    changes = membership.handle(REBORN, Welcome(REBORN, []), 1.0)
    assert changes == Changes(welcomed_by=REBORN, lost_gateways=(GATEWAY,))
    assert membership.knows(NodeRef("p", 1))


def test_a_silent_gateway_is_lost_and_a_beat_keeps_it() -> None:
    membership = Membership()
    membership.handle(GATEWAY, Welcome(GATEWAY, []), 0.0)
    membership.handle(GATEWAY, Beat(1, 0), 5.0)
    assert membership.expire(GATEWAY_SILENCE_S + 1) == Changes()
    assert membership.expire(GATEWAY_SILENCE_S + 5.1) == Changes(lost_gateways=(GATEWAY,))
    assert not membership.is_gateway(GATEWAY)


def test_a_gateway_that_was_only_silent_is_back_with_its_next_message() -> None:
    membership = Membership()
    membership.handle(GATEWAY, Welcome(GATEWAY, []), 0.0)
    membership.expire(GATEWAY_SILENCE_S + 1)
    assert membership.handle(GATEWAY, Beat(1, 0), 20.0) == Changes()
    assert membership.is_gateway(GATEWAY)
    assert membership.expire(20.0 + GATEWAY_SILENCE_S) == Changes()


def test_a_gateway_that_was_silent_and_came_back_as_another_life_stays_lost() -> None:
    membership = Membership()
    membership.handle(GATEWAY, Welcome(GATEWAY, []), 0.0)
    membership.expire(GATEWAY_SILENCE_S + 1)
    membership.handle(REBORN, Welcome(REBORN, []), 20.0)
    membership.handle(GATEWAY, Beat(1, 0), 21.0)
    assert not membership.is_gateway(GATEWAY)
    assert membership.is_gateway(REBORN)
