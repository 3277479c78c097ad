"""PrefixIndex by literals and against brute force over the prefixes each worker announced."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.cache_events import Cleared, Evicted, Stored
from baton.radix_cache.chain_hash import chain_hashes
from baton.radix_cache.index import PrefixIndex, PrefixIndexes
from baton.radix_cache.token_key import TokenKey

NS = "ns"
TOKENS = [1, 2, 3, 4, 5, 6, 7]
HASHES = chain_hashes(TOKENS, 2)  # 3 blocks


def stored(first: int, last: int, block_size: int = 2) -> Stored:
    """Blocks `first` up to `last` of TOKENS."""
    hashes = chain_hashes(TOKENS, block_size)
    parent = hashes[first - 1] if first else 0
    return Stored(NS, parent, hashes[first:last], TOKENS[first * block_size : last * block_size])


def test_every_worker_is_told_its_own_length() -> None:
    index = PrefixIndex(2)
    for worker, num_blocks in (("one", 1), ("two", 2), ("all", 3)):
        index.apply(worker, stored(0, num_blocks))
    assert index.match(NS, TOKENS) == {"one": 2, "two": 4, "all": 6}
    assert index.match(NS, TokenKey(TOKENS[:5])) == {"one": 2, "two": 4, "all": 4}
    assert index.match(NS, [1]) == {}
    assert index.match(NS, [9, *TOKENS]) == {}
    assert index.match("other", TOKENS) == {}
    assert len(index) == 3


def test_a_hole_ends_the_match() -> None:
    index = PrefixIndex(2)
    index.apply("w", stored(0, 3))
    index.apply("w", Evicted(NS, [HASHES[1]]))
    assert index.match(NS, TOKENS) == {"w": 2}
    index.apply("w", stored(1, 2))
    assert index.match(NS, TOKENS) == {"w": 6}
    index.apply("late", stored(1, 3))  # its first block is not known
    assert index.match(NS, TOKENS) == {"w": 6}


def test_repeats_and_strangers_do_no_harm() -> None:
    index = PrefixIndex(2)
    index.apply("w", Evicted(NS, HASHES))
    index.apply("w", Cleared())
    index.remove_worker("nobody")
    index.apply("w", stored(0, 2))
    index.apply("w", stored(0, 2))
    index.apply("v", stored(0, 1))
    index.apply("v", Evicted(NS, HASHES))
    index.apply("v", Evicted(NS, HASHES))
    index.apply("v", Stored(NS, 0, [], []))
    assert index.match(NS, TOKENS) == {"w": 4}


def test_nothing_is_left_of_a_worker_that_is_gone() -> None:
    index = PrefixIndex(2)
    for worker in ("a", "b", "c"):
        index.apply(worker, stored(0, 3))
    index.remove_worker("b")
    assert index.match(NS, TOKENS) == {"a": 6, "c": 6}
    index.apply("d", stored(0, 1))  # takes b's bit
    assert index.match(NS, TOKENS) == {"a": 6, "c": 6, "d": 2}
    index.apply("a", Cleared())
    index.apply("c", Evicted(NS, HASHES))
    index.remove_worker("d")
    assert index.match(NS, TOKENS) == {}
    assert (index._holders, index._held, index._bits) == ({}, {}, {})


def test_many_workers() -> None:
    index = PrefixIndex(2)
    for number in range(100):
        index.apply(f"w{number}", stored(0, 1 + number % 3))
    assert index.match(NS, TOKENS) == {f"w{number}": 2 * (1 + number % 3) for number in range(100)}


def test_workers_of_different_block_sizes_are_matched_together() -> None:
    indexes = PrefixIndexes()
    indexes.add_worker("small", 1)
    indexes.add_worker("large", 4)
    indexes.apply("small", stored(0, 6, block_size=1))
    indexes.apply("large", stored(0, 1, block_size=4))
    indexes.apply("stranger", stored(0, 1, block_size=4))
    assert indexes.match(NS, TOKENS) == {"small": 6, "large": 4}
    indexes.add_worker("large", 1)  # came back with another block size
    assert indexes.match(NS, TOKENS) == {"small": 6}
    assert set(indexes._indexes) == {1}
    indexes.remove_worker("small")
    indexes.remove_worker("small")
    assert indexes.match(NS, TOKENS) == {}
    indexes.remove_worker("large")
    assert indexes._indexes == {}


SEQUENCE = st.lists(st.integers(0, 1), max_size=8)
WORKER = st.sampled_from(["a", "b", "c"])
NAMESPACE = st.sampled_from(["x", "y"])


@given(
    st.lists(st.tuples(st.sampled_from(["store", "evict", "clear", "remove"]), WORKER, NAMESPACE, SEQUENCE)),
    NAMESPACE,
    SEQUENCE,
)
def test_any_events_agree_with_brute_force(
    changes: list[tuple[str, str, str, list[int]]], namespace: str, wanted: list[int]
) -> None:
    index = PrefixIndex(2)
    held: dict[str, set[tuple[str, tuple[int, ...]]]] = {"a": set(), "b": set(), "c": set()}
    for change, worker, where, token_ids in changes:
        whole = token_ids[: len(token_ids) // 2 * 2]
        hashes = chain_hashes(whole, 2)
        prefixes = {(where, tuple(whole[: 2 * n + 2])) for n in range(len(hashes))}
        if change == "store":
            index.apply(worker, Stored(where, 0, hashes, whole))
            held[worker] |= prefixes
        elif change == "evict":  # only the last block, as a tree would
            index.apply(worker, Evicted(where, hashes[-1:]))
            held[worker] -= {(where, tuple(whole))}
        else:
            if change == "clear":
                index.apply(worker, Cleared())
            else:
                index.remove_worker(worker)
            held[worker].clear()
    expected = {}
    for worker, prefixes in held.items():
        num_tokens = 0
        while num_tokens + 2 <= len(wanted) and (namespace, tuple(wanted[: num_tokens + 2])) in prefixes:
            num_tokens += 2
        if num_tokens:
            expected[worker] = num_tokens
    assert index.match(namespace, wanted) == expected
    assert len(index) == len(set().union(*held.values()))
