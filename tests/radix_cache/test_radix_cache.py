"""RadixCache by literals. RX numbers are faults that other servers shipped, each as the test that would catch it."""

from random import Random

import pytest

from baton.core.cache_events import Cleared, Evicted, Stored
from baton.core.errors import LocalProtocolError, OutOfBlocks
from baton.radix_cache import chain_hash
from baton.radix_cache.block_pool import BlockState
from baton.radix_cache.cache import RadixCache
from baton.radix_cache.chain_hash import chain_hashes
from baton.radix_cache.token_key import TokenKey

A, B, C, D = [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3], [4, 4, 4, 4]  # one block each
NS = "model/tenant"


def put(cache: RadixCache, token_ids: list[int], namespace: str = NS) -> list[int]:
    """What a request does that computes `token_ids` and ends. Returns the blocks that now hold them."""
    handle = cache.match(namespace, token_ids)
    needed = -(-len(token_ids) // cache.block_size) - len(handle.block_ids)
    table = handle.block_ids + cache.allocate(needed)
    result = cache.insert(namespace, token_ids, table, handle)
    cache.pool.free(result.duplicate_block_ids)
    cache.release(result.handle)
    num_full = len(token_ids) // cache.block_size
    cache.pool.free(result.canonical_block_ids[num_full:])
    cache.check_integrity()
    return result.canonical_block_ids[:num_full]


def found(cache: RadixCache, token_ids: list[int], namespace: str = NS, limit: int | None = None) -> list[int]:
    """The blocks that a match finds, released again."""
    handle = cache.match(namespace, token_ids, limit)
    cache.check_integrity()
    cache.release(handle)
    cache.check_integrity()
    assert handle.num_tokens == len(handle.block_ids) * cache.block_size
    return handle.block_ids


def test_a_cold_cache_matches_nothing_and_remembers_no_namespace() -> None:
    cache = RadixCache(8, 4)
    assert found(cache, A + B) == []
    assert cache.tree.roots == {}


def test_the_longest_prefix_is_found() -> None:
    cache = RadixCache(8, 4)
    assert put(cache, A + B + C) == [0, 1, 2]
    assert found(cache, A + B + C) == [0, 1, 2]
    assert found(cache, A + B + C + D) == [0, 1, 2]
    assert found(cache, A + B + D) == [0, 1]
    assert found(cache, A) == [0]
    assert found(cache, B + C) == []


def test_a_packed_key_finds_the_same() -> None:
    cache = RadixCache(8, 4)
    key = TokenKey(A + B)
    result = cache.insert(NS, key, cache.allocate(2))
    cache.release(result.handle)
    handle = cache.match(NS, key, limit=7)
    assert handle.block_ids == [0]


@pytest.mark.parametrize(("limit", "expected"), [(-1, 0), (0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (99, 2), (None, 2)])
def test_the_limit_counts_tokens_and_cuts_to_blocks(limit: int | None, expected: int) -> None:
    cache = RadixCache(8, 4)
    put(cache, A + B)
    assert len(found(cache, A + B + C, limit=limit)) == expected


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (32, 2)])
def test_rx06_keys_around_a_block(num_tokens: int, num_blocks: int) -> None:
    cache = RadixCache(4, 16)
    token_ids = list(range(num_tokens))
    table = cache.allocate(-(-num_tokens // 16))
    result = cache.insert(NS, token_ids, table)
    assert result.canonical_block_ids == table
    assert result.handle.num_tokens == num_blocks * 16
    assert result.handle.block_ids == table[:num_blocks]
    assert cache.pool.counts().cached == cache.tree.num_blocks == num_blocks
    cache.check_integrity()
    cache.release(result.handle)
    assert cache.num_available == 4 - len(table) + num_blocks
    assert found(cache, token_ids) == table[:num_blocks]
    assert len(found(cache, token_ids, limit=num_tokens - 1)) == max(num_tokens - 1, 0) // 16  # RX03


def test_a_prefix_in_the_middle_of_a_node_splits_it_and_locks_only_that() -> None:
    cache = RadixCache(8, 4)
    put(cache, A + B + C)
    handle = cache.match(NS, A + B + D)
    cache.check_integrity()
    assert cache.tree.num_nodes == 2
    assert cache.tree.num_evictable == 1  # C
    cache.release(handle)
    assert put(cache, A + B + D) == [0, 1, 3]
    assert put(cache, A + D) == [0, 4]
    assert [found(cache, A + x) for x in (B + C, B + D, D)] == [[0, 1, 2], [0, 1, 3], [0, 4]]


def test_a_handle_stays_right_when_its_node_is_split() -> None:
    cache = RadixCache(8, 4)
    put(cache, A + B + C)
    whole = cache.match(NS, A + B + C)
    part = cache.match(NS, A + D)
    cache.check_integrity()
    cache.release(part)
    assert cache.evict(8) == 0
    cache.release(whole)
    assert cache.evict(8) == 3


@pytest.mark.parametrize("block_size", [1, 2, 128])
def test_other_block_sizes(block_size: int) -> None:
    cache = RadixCache(8, block_size)
    token_ids = list(range(3 * block_size))
    assert put(cache, token_ids) == [0, 1, 2]
    assert found(cache, token_ids, limit=len(token_ids) - 1) == [0, 1]


@pytest.mark.parametrize("block_size", [0, 3, 256])
def test_block_sizes_that_are_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        RadixCache(8, block_size)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 8, 13])
def test_a_node_is_split_after_any_block(num_blocks: int) -> None:
    token_ids = list(range(2 * num_blocks))
    for num_shared in range(num_blocks + 1):
        cache = RadixCache(16, 2)
        blocks = put(cache, token_ids)
        other = [*token_ids[: 2 * num_shared + 1], *[99] * 20]  # the next block differs in its second token
        assert found(cache, other) == blocks[:num_shared]
        assert found(cache, token_ids[: 2 * num_shared + 1]) == blocks[:num_shared]


def test_namespaces_share_nothing() -> None:
    cache = RadixCache(8, 4)
    put(cache, A, "one")
    assert found(cache, A, "two") == []
    assert put(cache, A, "two") == [1]
    assert (found(cache, A, "one"), found(cache, A, "two")) == ([0], [1])
    assert cache.evict(8) == 2
    assert cache.tree.roots == {}


def test_rx01_a_lock_keeps_the_node_and_all_its_ancestors() -> None:
    cache = RadixCache(4, 4)
    put(cache, A)
    put(cache, A + B)
    handle = cache.match(NS, A + B)
    assert [node.lock_count for node in cache.tree.nodes()] == [1, 1]
    assert cache.evict(4) == 0
    assert cache.flush() == 0
    cache.release(handle)
    assert [node.lock_count for node in cache.tree.nodes()] == [0, 0]
    assert cache.evict(4) == 2


def test_a_lock_is_counted() -> None:
    cache = RadixCache(4, 4)
    put(cache, A)
    first, second = cache.match(NS, A), cache.match(NS, A)
    assert cache.ledger().locks == 2
    cache.release(first)
    assert cache.evict(1) == 0
    cache.release(second)
    assert cache.evict(1) == 1


@pytest.mark.parametrize("token_ids", [A, []], ids=["a block", "empty"])
def test_releasing_twice_raises(token_ids: list[int]) -> None:
    cache = RadixCache(4, 4)
    put(cache, A)
    handle = cache.match(NS, token_ids)
    cache.release(handle)
    with pytest.raises(LocalProtocolError, match="released twice"):
        cache.release(handle)
    cache.check_integrity()


def test_rx02_duplicates_are_returned_with_the_blocks_to_use_instead() -> None:
    """Two requests compute one prefix at the same time; the second to insert must go on with the first one's blocks."""
    cache = RadixCache(8, 4)
    first, second = cache.allocate(2), cache.allocate(3)
    kept = cache.insert(NS, A + B, first)
    result = cache.insert(NS, A + B + C[:2], second)
    assert result.canonical_block_ids == [0, 1, 4]  # the partial block stays the caller's
    assert result.duplicate_block_ids == [2, 3]
    assert [cache.pool.state(b) for b in second] == [BlockState.PRIVATE] * 3
    cache.pool.free(result.duplicate_block_ids)
    cache.release(kept.handle)
    cache.check_integrity()
    assert cache.allocate(5) == [2, 3, 5, 6, 7]
    with pytest.raises(OutOfBlocks):
        cache.allocate(1)  # the second request's lock holds what it reads
    result = cache.insert(NS, A + B + C, result.canonical_block_ids, result.handle)
    assert result.canonical_block_ids == [0, 1, 4]
    assert result.duplicate_block_ids == []


def test_duplicates_in_the_middle_are_replaced_and_the_rest_is_new() -> None:
    cache = RadixCache(8, 4)
    put(cache, A + B)
    held = cache.match(NS, A)
    table = held.block_ids + cache.allocate(2)
    result = cache.insert(NS, A + B + C, table, held)
    assert (table, result.canonical_block_ids, result.duplicate_block_ids) == ([0, 2, 3], [0, 1, 3], [2])
    assert held not in cache.handles
    assert cache.handles == {result.handle}
    cache.check_integrity()


def test_an_insert_goes_on_chunk_by_chunk() -> None:
    cache = RadixCache(8, 2)
    token_ids, table = list(range(50, 61)), cache.allocate(6)
    handle = cache.match(NS, token_ids)
    for num_tokens in (1, 4, 5, 9, 11):
        result = cache.insert(NS, token_ids[:num_tokens], table, handle)
        handle = result.handle
        assert handle.block_ids == table[: num_tokens // 2]
        assert (result.canonical_block_ids, result.duplicate_block_ids) == (table, [])
        assert cache.pool.counts().cached == num_tokens // 2
        cache.check_integrity()
    assert cache.evict(9) == 0


def test_rx07_a_block_cannot_enter_the_tree_twice() -> None:
    """A request whose tail changed after it was inserted comes again with the same blocks."""
    cache = RadixCache(8, 4)
    table = cache.allocate(2)
    kept = cache.insert(NS, A + B, table)
    wrong = [
        (A + C, table, None),  # block 1 holds B, and the tree has it
        (A + B, table, None),  # its own blocks, without the handle that locks them
        (A + C, table, kept.handle),  # a token below the handle changed
        (C + D, [2, 2], None),
    ]
    cache.allocate(1)
    for token_ids, block_ids, handle in wrong:
        with pytest.raises(LocalProtocolError):
            cache.insert(NS, token_ids, block_ids, handle)
        cache.check_integrity()
    with pytest.raises(LocalProtocolError, match="named twice"):
        cache.insert(NS, A + B + C, [2, *cache.allocate(1), 2])
    counts = cache.pool.counts()
    assert (counts.cached, counts.private) == (2, 2)
    assert found(cache, A + B) == [0, 1]


def test_an_insert_that_does_not_fit_raises() -> None:
    cache = RadixCache(8, 4)
    kept = cache.insert(NS, A + B, cache.allocate(2)).handle
    with pytest.raises(LocalProtocolError, match="fill 2 blocks"):
        cache.insert(NS, A + B, cache.allocate(1))
    with pytest.raises(LocalProtocolError, match="more than are inserted"):
        cache.insert(NS, A, [0, 1], kept)
    with pytest.raises(LocalProtocolError, match="namespace"):
        cache.insert("other", A + B, [0, 1], kept)
    with pytest.raises(LocalProtocolError, match="not those of the handle"):
        cache.insert(NS, A + B, [1, 0], kept)
    cache.release(kept)
    with pytest.raises(LocalProtocolError, match="released"):
        cache.insert(NS, A + B, [0, 1], kept)
    cache.check_integrity()


def test_rx10_an_evicted_block_forgets_what_it_held() -> None:
    cache = RadixCache(2, 4)
    assert put(cache, A + B) == [0, 1]
    assert sorted(put(cache, C + D)) == [0, 1]  # evicts A and B
    assert found(cache, A + B) == []
    assert len(found(cache, C + D)) == 2
    assert sorted(put(cache, A + B)) == [0, 1]
    assert found(cache, C + D) == []


def test_rx12_equal_hashes_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_hash, "xxh3_64_digest", lambda _: b"\7" * 8)
    cache = RadixCache(8, 4)
    put(cache, A + B)
    assert found(cache, C + D) == []
    assert put(cache, C + D) == [2, 3]
    assert (found(cache, A + B), found(cache, A + D), found(cache, C + D)) == ([0, 1], [0], [2, 3])
    assert {h for event in cache.snapshot() for h in event.hashes} == {0x0707070707070707}


def test_rx19_only_the_missing_blocks_are_evicted() -> None:
    cache = RadixCache(6, 4)
    put(cache, A + B + C + D)
    assert cache.allocate(2) == [4, 5]
    assert cache.pool.counts().cached == 4
    assert cache.allocate(0) == []
    assert cache.pool.counts().cached == 4
    assert cache.allocate(1) == [3]  # the end of the leaf, not the leaf
    assert found(cache, A + B + C + D) == [0, 1, 2]
    cache.check_integrity()


def test_an_allocation_that_cannot_succeed_evicts_nothing() -> None:
    cache = RadixCache(4, 4)
    put(cache, A + B)
    lock = cache.match(NS, A)
    assert cache.num_available == 3
    with pytest.raises(OutOfBlocks, match="4 blocks wanted, 2 are free and 1 evictable of 4"):
        cache.allocate(4)
    assert found(cache, A + B) == [0, 1]
    cache.allocate(3, BlockState.RESERVED)
    assert cache.num_available == 0
    counts = cache.pool.counts()
    assert (counts.reserved, counts.cached) == (3, 1)
    cache.release(lock)
    assert cache.num_available == 1


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = RadixCache(8, 4)
    for block in (A, B, C):
        put(cache, block)
    found(cache, A)
    cache.evict(1)
    assert [len(found(cache, block)) for block in (A, B, C)] == [1, 0, 1]
    cache.evict(1)  # A was looked at before C
    assert [len(found(cache, block)) for block in (A, C)] == [0, 1]


def test_a_parent_goes_after_its_children_in_its_own_turn() -> None:
    cache = RadixCache(8, 4)
    put(cache, A + B)
    put(cache, C)
    put(cache, A + D)
    order = []
    while cache.evict(1):
        order += cache.drain_events()[-1].hashes
    ab, ad = chain_hashes(A + B, 4), chain_hashes(A + D, 4)
    assert order == [ab[1], chain_hashes(C, 4)[0], ad[1], ad[0]]


def test_eviction_keeps_its_order_however_often_leaves_were_used() -> None:
    """Evictions stir the heap; then a few hot leaves fill it with stale entries, until it is rebuilt."""
    cache, rng = RadixCache(100, 1), Random(3)
    oldest_first = list(range(100))
    rng.shuffle(oldest_first)
    for token_id in oldest_first:
        put(cache, [token_id])
    cache.drain_events()
    order: list[int] = []
    for _ in range(4):
        hot = rng.sample(oldest_first, 5)
        for token_id in rng.choices(hot, k=400):
            cache.release(cache.match(NS, [token_id]))
            oldest_first.remove(token_id)
            oldest_first.append(token_id)
        cache.check_integrity()
        assert cache.evict(20) == 20
        order += oldest_first[:20]
        del oldest_first[:20]
    (evicted,) = cache.drain_events()
    assert evicted == Evicted(NS, [chain_hashes([token_id], 1)[0] for token_id in order])


def test_a_locked_parent_gets_in_line_once_when_its_child_was_evicted() -> None:
    cache = RadixCache(8, 4)
    put(cache, A + B)
    put(cache, C)
    lock = cache.match(NS, A)
    assert cache.evict(1) == 1  # B
    cache.check_integrity()
    cache.release(lock)
    cache.check_integrity()
    assert len(found(cache, A + B)) == 1


def test_matches_without_eviction_do_not_grow_the_heap() -> None:
    cache = RadixCache(8, 4)
    put(cache, A + B)
    put(cache, A + C)
    for _ in range(500):
        found(cache, A + B)
    assert len(cache.tree.lru) <= 2 * 3 + 17


def test_flush_leaves_what_is_locked() -> None:
    cache = RadixCache(8, 4)
    put(cache, A + B)
    put(cache, C)
    lock = cache.match(NS, A)
    cache.drain_events()
    assert cache.flush() == 2
    cache.check_integrity()
    (evicted,) = cache.drain_events()
    assert isinstance(evicted, Evicted)
    assert set(evicted.hashes) == {*chain_hashes(A + B, 4)[1:], *chain_hashes(C, 4)}
    assert cache.flush() == 0
    assert cache.drain_events() == []
    cache.release(lock)
    assert cache.flush() == 1
    assert cache.drain_events() == [Cleared()]
    assert cache.flush() == 0
    assert cache.drain_events() == []
    cache.check_integrity()
    assert cache.pool.num_free == 8
    assert len(put(cache, A + B)) == 2


def test_an_empty_handle_survives_a_flush() -> None:
    cache = RadixCache(8, 4)
    put(cache, A)
    empty = cache.match(NS, B)
    assert cache.flush() == 1
    result = cache.insert(NS, B, cache.allocate(1), empty)
    cache.release(result.handle)
    cache.check_integrity()


def test_events_tell_what_happened_in_order() -> None:
    cache = RadixCache(4, 2)
    put(cache, [1, 2, 3, 4, 5])
    put(cache, [1, 2, 7, 8])
    put(cache, [9, 9, 9, 9])  # evicts [3, 4]
    a, b = chain_hashes([1, 2, 3, 4], 2)
    c, d = chain_hashes([7, 8], 2, a)[0], chain_hashes([9, 9, 9, 9], 2)
    assert cache.drain_events() == [
        Stored(NS, 0, [a, b], [1, 2, 3, 4]),
        Stored(NS, a, [c], [7, 8]),
        Evicted(NS, [b]),
        Stored(NS, 0, d, [9, 9, 9, 9]),
    ]
    assert cache.drain_events() == []


def test_neighbouring_evictions_are_one_event_for_each_namespace() -> None:
    cache = RadixCache(8, 4)
    put(cache, A)
    put(cache, B)
    put(cache, C, "other")
    cache.drain_events()
    cache.evict(3)
    events = cache.drain_events()
    assert events == [
        Evicted(NS, [*chain_hashes(A, 4), *chain_hashes(B, 4)]),
        Evicted("other", chain_hashes(C, 4)),
    ]


def test_a_snapshot_is_the_tree_parents_first() -> None:
    cache = RadixCache(8, 4)
    put(cache, A + B + C)
    put(cache, A + B + D)
    put(cache, A, "other")
    events = cache.snapshot()
    assert all(isinstance(event, Stored) for event in events)
    abc, abd = chain_hashes(A + B + C, 4), chain_hashes(A + B + D, 4)
    told = {(event.namespace, event.parent, *event.hashes): event.token_ids for event in events}
    assert told == {
        (NS, 0, *abc[:2]): A + B,
        (NS, abc[1], abc[2]): C,
        (NS, abc[1], abd[2]): D,
        ("other", 0, abc[0]): A,
    }
    known = {0}
    for event in events:
        assert event.parent in known
        known.update(event.hashes)


def test_events_that_nobody_drains_become_a_snapshot() -> None:
    cache = RadixCache(2, 1)
    for token_id in range(2000):
        put(cache, [token_id])
    assert len(cache._events._pending) < 1100
    events = cache.drain_events()
    assert events[0] == Cleared()
    assert [event.token_ids for event in events[1:] if isinstance(event, Stored)] in (
        [[1999], [1998]],
        [[1998], [1999]],
    )
    put(cache, [5])
    assert [type(event) for event in cache.drain_events()] == [Evicted, Stored]


def test_the_ledger_adds_up_and_knows_idle() -> None:
    cache = RadixCache(8, 4)
    assert cache.ledger().idle
    put(cache, A)
    assert cache.ledger().idle
    private, reserved = cache.allocate(2), cache.allocate(1, BlockState.RESERVED)
    lock = cache.match(NS, A)
    ledger = cache.ledger()
    assert (ledger.total, ledger.free, ledger.cached, ledger.private, ledger.reserved) == (8, 4, 1, 2, 1)
    assert ledger.locks == 1
    assert not ledger.idle
    cache.pool.free(private + reserved)
    assert not cache.ledger().idle
    cache.release(lock)
    assert cache.ledger().idle


def test_a_deep_tree_needs_no_recursion() -> None:
    cache = RadixCache(1200, 1)
    handle = cache.match(NS, [])
    table: list[int] = []
    for num_tokens in range(1, 1201):
        table += cache.allocate(1)
        handle = cache.insert(NS, range(num_tokens), table, handle).handle
    assert cache.tree.num_nodes == 1200
    cache.check_integrity()
    assert sum(len(event.hashes) for event in cache.snapshot()) == 1200
    cache.release(handle)
    assert cache.evict(1200) == 1200
    cache.check_integrity()


def test_a_look_at_what_is_cached_locks_nothing_and_makes_nothing_last_longer() -> None:
    cache = RadixCache(4, 4)
    put(cache, A + B)
    put(cache, C + D)
    assert cache.num_cached_tokens(NS, [*A, *B, 9]) == 8
    assert cache.num_cached_tokens(NS, A + B, limit=7) == 4
    assert cache.num_cached_tokens(NS, A + C) == 4
    assert cache.num_cached_tokens("another", A) == 0
    assert cache.num_available == 4
    cache.evict(2)
    assert cache.num_cached_tokens(NS, A + B) == 0, "the least recently used went first"
    assert cache.num_cached_tokens(NS, C + D) == 8
