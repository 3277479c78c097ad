"""RadixCache against a model of one dict, driven by hypothesis; and the gateway's index fed with its events.

The model knows no tree: a prefix of whole blocks |-> (block id, when it was last used). A prefix may be evicted when
no longer prefix of its namespace is cached and no lock covers it; the least recently used goes first.
"""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.cache_events import CacheEvent, Cleared, Evicted, Stored
from baton.core.errors import LocalProtocolError, OutOfBlocks
from baton.radix_cache.block_pool import BlockState
from baton.radix_cache.cache import PrefixHandle, RadixCache
from baton.radix_cache.chain_hash import chain_hashes
from baton.radix_cache.index import PrefixIndex
from baton.radix_cache.token_key import TokenKey

BLOCK = 2
NUM_BLOCKS = 12
Prefix = tuple[str, tuple[int, ...]]  # namespace, tokens in whole blocks

NAMESPACES = st.sampled_from(["x", "y"])
# Mostly beginnings of one sequence with a short tail of their own, so that nodes are long and split anywhere.
TOKENS = st.builds(
    lambda shared, tail: [5] * shared + tail, st.integers(0, 10), st.lists(st.integers(4, 5), max_size=4)
)
PICK = st.integers(0, 9)


@dataclass
class Entry:
    block_id: int
    last_used: int


@dataclass
class Running:
    """A request that computed `token_ids`; the first `num_held` blocks of `table` are locked by `handle`."""

    namespace: str
    token_ids: list[int]
    table: list[int]
    handle: PrefixHandle


class NaiveCache:
    def __init__(self) -> None:
        self.entries: dict[Prefix, Entry] = {}
        self.locks: list[Prefix] = []
        self.time = 0

    def prefixes(self, namespace: str, token_ids: list[int], num_tokens: int) -> list[Prefix]:
        """All whole-block prefixes of the first `num_tokens` tokens, shortest first."""
        stops = range(BLOCK, min(num_tokens, len(token_ids)) + 1, BLOCK)
        return [(namespace, tuple(token_ids[:stop])) for stop in stops]

    def match(self, namespace: str, token_ids: list[int], num_tokens: int) -> list[int]:
        found = [p for p in self.prefixes(namespace, token_ids, num_tokens) if p in self.entries]
        return [self.entries[p].block_id for p in found]

    def lock(self, namespace: str, token_ids: list[int], num_blocks: int) -> None:
        self.time += 1
        for prefix in self.prefixes(namespace, token_ids, num_blocks * BLOCK):
            self.entries[prefix].last_used = self.time
        self.locks.append((namespace, tuple(token_ids[: num_blocks * BLOCK])))

    def unlock(self, namespace: str, token_ids: list[int], num_blocks: int) -> None:
        self.locks.remove((namespace, tuple(token_ids[: num_blocks * BLOCK])))

    def is_locked(self, prefix: Prefix) -> bool:
        return any(extends(lock, prefix) for lock in self.locks)

    def evict(self, n: int) -> list[int]:
        evicted: list[int] = []
        while len(evicted) < n:
            leaves = [
                prefix
                for prefix in self.entries
                if not self.is_locked(prefix)
                and not any(other != prefix and extends(other, prefix) for other in self.entries)
            ]
            if not leaves:
                break
            oldest = min(leaves, key=lambda prefix: self.entries[prefix].last_used)
            evicted.append(self.entries.pop(oldest).block_id)
        return evicted

    @property
    def num_evictable(self) -> int:
        return sum(not self.is_locked(prefix) for prefix in self.entries)


def extends(longer: Prefix, prefix: Prefix) -> bool:
    return longer[0] == prefix[0] and longer[1][: len(prefix[1])] == prefix[1]


class RadixCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache(NUM_BLOCKS, BLOCK)
        self.naive = NaiveCache()
        self.running: list[Running] = []
        self.replica: dict[tuple[str, int], tuple[int, ...]] = {}  # rebuilt from events alone
        self.index = PrefixIndex(BLOCK)

    def lock_naive(self, handle: PrefixHandle, token_ids: list[int]) -> None:
        self.naive.lock(handle.namespace, token_ids, len(handle.block_ids))

    def allocate(self, n: int) -> list[int] | None:
        free = self.cache.pool.num_free
        available = free + self.naive.num_evictable
        if n > available:
            before = dict(self.naive.entries)
            with pytest.raises(OutOfBlocks):
                self.cache.allocate(n)
            assert self.cached_block_ids() == {entry.block_id for entry in before.values()}
            return None
        evicted = self.naive.evict(n - free)
        block_ids = self.cache.allocate(n)
        assert set(evicted) <= set(block_ids)
        return block_ids

    def cached_block_ids(self) -> set[int]:
        return {b for b in range(NUM_BLOCKS) if self.cache.pool.state(b) is BlockState.CACHED}

    @rule(namespace=NAMESPACES, token_ids=TOKENS, leave_one=st.booleans(), packed=st.booleans())
    def start(self, namespace: str, token_ids: list[int], leave_one: bool, packed: bool) -> None:
        limit = len(token_ids) - 1 if leave_one else None
        key = TokenKey(token_ids) if packed else token_ids
        expected = self.naive.match(namespace, token_ids, len(token_ids) if limit is None else limit)
        num_nodes = self.cache.tree.num_nodes
        assert self.cache.num_cached_tokens(namespace, key, limit) == len(expected) * BLOCK
        assert self.cache.tree.num_nodes == num_nodes, "a look leaves no trace"
        handle = self.cache.match(namespace, key, limit)
        assert handle.block_ids == expected
        assert handle.num_tokens == len(expected) * BLOCK
        self.lock_naive(handle, token_ids)
        new = self.allocate(-(-len(token_ids) // BLOCK) - len(expected))
        if new is None:
            self.cache.release(handle)
            self.naive.unlock(namespace, token_ids, len(expected))
        else:
            self.running.append(Running(namespace, token_ids, handle.block_ids + new, handle))

    @precondition(lambda self: self.running)
    @rule(which=PICK, token_ids=TOKENS)
    def decode_more(self, which: int, token_ids: list[int]) -> None:
        request = self.running[which % len(self.running)]
        num_tokens = len(request.token_ids) + len(token_ids)
        new = self.allocate(-(-num_tokens // BLOCK) - len(request.table))
        if new is not None:
            request.table += new
            request.token_ids = request.token_ids + token_ids

    def insert(self, request: Running, num_tokens: int) -> None:
        token_ids = request.token_ids[:num_tokens]
        num_held = len(request.handle.block_ids)
        expected, duplicates = list(request.table), []
        for position, prefix in enumerate(self.naive.prefixes(request.namespace, token_ids, num_tokens)):
            entry = self.naive.entries.setdefault(prefix, Entry(request.table[position], 0))
            if entry.block_id != request.table[position]:
                duplicates.append(request.table[position])
                expected[position] = entry.block_id
        result = self.cache.insert(request.namespace, token_ids, request.table, request.handle)
        assert result.canonical_block_ids == expected
        assert result.duplicate_block_ids == duplicates
        assert result.handle.block_ids == expected[: num_tokens // BLOCK]
        self.lock_naive(result.handle, token_ids)
        self.naive.unlock(request.namespace, token_ids, num_held)
        request.table, request.handle = result.canonical_block_ids, result.handle
        self.cache.pool.free(result.duplicate_block_ids)

    @precondition(lambda self: self.running)
    @rule(which=PICK, beyond=st.integers(0, 9))
    def insert_a_chunk(self, which: int, beyond: int) -> None:
        request = self.running[which % len(self.running)]
        self.insert(request, min(request.handle.num_tokens + beyond, len(request.token_ids)))

    @precondition(lambda self: self.running)
    @rule(which=PICK, aborted=st.booleans())
    def finish(self, which: int, aborted: bool) -> None:
        request = self.running.pop(which % len(self.running))
        if not aborted:
            self.insert(request, len(request.token_ids))
        num_held = len(request.handle.block_ids)
        self.cache.release(request.handle)
        self.naive.unlock(request.namespace, request.token_ids, num_held)
        self.cache.pool.free(request.table[num_held:])
        with pytest.raises(LocalProtocolError):
            self.cache.release(request.handle)

    @rule(n=st.integers(0, 5))
    def evict(self, n: int) -> None:
        evicted = self.naive.evict(n)
        assert self.cache.evict(n) == len(evicted)
        assert all(self.cache.pool.state(b) is BlockState.FREE for b in evicted)

    @rule()
    def flush(self) -> None:
        assert self.cache.flush() == len(self.naive.evict(NUM_BLOCKS))

    @rule()
    def drain(self) -> None:
        """Events replayed give the tree; so does a snapshot; the gateway's index says what a match would find."""
        for event in self.cache.drain_events():
            self.replay(event)
            self.index.apply("worker", event)
        told = {(namespace, tokens) for (namespace, _), tokens in self.replica.items()}
        assert told == set(self.naive.entries)
        copy = dict(self.replica)
        self.replay(Cleared())
        for event in self.cache.snapshot():
            self.replay(event)
        assert self.replica == copy
        assert len(self.index) == len(self.naive.entries)

    @rule(namespace=NAMESPACES, token_ids=TOKENS)
    def ask_the_index(self, namespace: str, token_ids: list[int]) -> None:
        self.drain()
        found = self.naive.match(namespace, token_ids, len(token_ids))
        assert self.index.match(namespace, token_ids) == ({"worker": len(found) * BLOCK} if found else {})

    def replay(self, event: CacheEvent) -> None:
        match event:
            case Stored(namespace, parent, hashes, token_ids):
                before = self.replica[namespace, parent] if parent else ()
                whole = [*before, *token_ids]
                assert hashes == chain_hashes(whole, BLOCK)[-len(hashes) :]
                assert len(token_ids) == len(hashes) * BLOCK
                for position, chain_hash in enumerate(hashes):
                    stop = len(before) + (position + 1) * BLOCK
                    assert (namespace, chain_hash) not in self.replica
                    self.replica[namespace, chain_hash] = tuple(whole[:stop])
            case Evicted(namespace, hashes):
                for chain_hash in hashes:
                    del self.replica[namespace, chain_hash]
            case Cleared():
                self.replica.clear()

    @invariant()
    def everything_adds_up(self) -> None:
        self.cache.check_integrity()
        assert self.cached_block_ids() == {entry.block_id for entry in self.naive.entries.values()}
        private = [b for request in self.running for b in request.table[len(request.handle.block_ids) :]]
        assert len(set(private)) == len(private)
        assert all(self.cache.pool.state(b) is BlockState.PRIVATE for b in private)
        counts = self.cache.pool.counts()
        assert (counts.cached, counts.private) == (len(self.naive.entries), len(private))
        assert counts.free == NUM_BLOCKS - counts.cached - counts.private
        assert self.cache.num_available == counts.free + self.naive.num_evictable
        assert self.cache.ledger().locks == len(self.running)

    def teardown(self) -> None:
        while self.running:
            self.finish(0, aborted=False)
        assert self.cache.ledger().idle
        self.cache.flush()
        assert self.cache.pool.num_free == NUM_BLOCKS
        assert self.cache.tree.roots == {}


RadixCacheMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestRadixCacheMachine = RadixCacheMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestRadixCacheMachineLonger(RadixCacheMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=500, stateful_step_count=60, deadline=None)
