"""The index follows the workers' updates; a lost one is noticed and repaired by a snapshot."""

from typing import Any

import pytest

from baton.core.cache_events import Evicted, Stored
from baton.core.messages import CacheSnapshot, CacheSnapshotQuery, CacheUpdate, Message, NodeRef, Role
from baton.gateway.cache_feed import CacheFeed
from baton.radix_cache.chain_hash import chain_hashes
from baton.radix_cache.index import PrefixIndexes

TOKENS = list(range(48))
HASHES = chain_hashes(TOKENS, 16)


def stored(first: int, last: int) -> Stored:
    parent = HASHES[first - 1] if first else 0
    return Stored("ns", parent, HASHES[first:last], TOKENS[first * 16 : last * 16])


class Feed:
    def __init__(self, info: Any):
        self.index = PrefixIndexes()
        self.sent: list[tuple[NodeRef, Message]] = []
        self.feed = CacheFeed(self.index, self._send)
        self.info = info
        self.ref = info.ref
        self.feed.worker_joined(info)

    def _send(self, to: NodeRef, message: Message) -> bool:
        self.sent.append((to, message))
        return True

    def say(self, body: Message) -> int:
        """Handles it; cached tokens of TOKENS now."""
        self.feed.handle(self.ref, body)
        return self.index.match("ns", TOKENS).get("decode-0", 0)


@pytest.fixture
def feed(world_module: Any) -> Feed:
    return Feed(world_module.worker_info("decode-0", Role.DECODE))


def test_updates_after_a_snapshot(feed: Feed) -> None:
    assert feed.say(CacheSnapshot(4, [stored(0, 1)])) == 16
    assert feed.say(CacheUpdate(5, [stored(1, 3)])) == 48
    assert feed.say(CacheUpdate(6, [Evicted("ns", HASHES[2:])])) == 32
    assert feed.sent == []


def test_nothing_is_known_before_the_snapshot(feed: Feed) -> None:
    assert feed.say(CacheUpdate(1, [stored(0, 1)])) == 0
    assert feed.say(CacheSnapshot(1, [stored(0, 2)])) == 32


def test_repeats_are_dropped(feed: Feed) -> None:
    feed.say(CacheSnapshot(0, []))
    feed.say(CacheUpdate(1, [stored(0, 3)]))
    feed.say(CacheUpdate(2, [Evicted("ns", HASHES[1:])]))
    assert feed.say(CacheUpdate(1, [stored(0, 3)])) == 16
    assert feed.sent == []


def test_a_gap_asks_for_a_snapshot_once(feed: Feed) -> None:
    feed.say(CacheSnapshot(0, [stored(0, 1)]))
    assert feed.say(CacheUpdate(2, [stored(1, 2)])) == 16
    assert feed.say(CacheUpdate(3, [stored(2, 3)])) == 16
    assert feed.sent == [(feed.ref, CacheSnapshotQuery())]
    assert feed.say(CacheSnapshot(3, [stored(0, 3)])) == 48
    assert feed.say(CacheUpdate(4, [Evicted("ns", HASHES)])) == 0


def test_a_snapshot_replaces_what_was_known(feed: Feed) -> None:
    feed.say(CacheSnapshot(0, [stored(0, 3)]))
    assert feed.say(CacheSnapshot(9, [stored(0, 1)])) == 16


def test_a_worker_that_left_is_forgotten(feed: Feed) -> None:
    feed.say(CacheSnapshot(0, [stored(0, 3)]))
    feed.feed.worker_left(feed.info)
    assert feed.say(CacheUpdate(1, [stored(0, 1)])) == 0
    assert feed.say(CacheSnapshot(1, [stored(0, 1)])) == 0


def test_a_snapshot_that_never_comes_is_asked_for_again(feed: Feed) -> None:
    feed.feed.tick(100.0)
    feed.feed.tick(104.0)
    assert feed.sent == []
    feed.feed.tick(105.1)
    feed.feed.tick(106.0)
    assert feed.sent == [(feed.ref, CacheSnapshotQuery())]
    assert feed.say(CacheSnapshot(3, [stored(0, 2)])) == 32
    feed.feed.tick(200.0)
    assert len(feed.sent) == 1
