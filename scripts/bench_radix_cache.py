"""Times RadixCache on one core: `python scripts/bench_radix_cache.py`. Prints medians in microseconds.

A key has 8,192 tokens of which the first 4,096 are cached; blocks of 16. The pool holds a few dozen such tails below
one shared prefix and is full, as it is in a busy server.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from baton.radix_cache.cache import RadixCache
from baton.radix_cache.index import PrefixIndex
from baton.radix_cache.token_key import TokenKey

BLOCK_SIZE = 16
NUM_TOKENS = 8192
NUM_SHARED = 4096
ROUNDS = 400
NAMESPACE = "bench"


class Stopwatch:
    """Collects the times of named steps."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def __call__(self, name: str, step: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = step()
        self.samples.setdefault(name, []).append((time.perf_counter() - start) * 1e6)
        return result


def one_request(cache: RadixCache, token_ids: list[int], watch: Stopwatch, index: PrefixIndex) -> None:
    """Match, evict what is missing, insert, release, drain: every step of a prompt's life in the cache."""
    key = watch("pack the key", lambda: TokenKey(token_ids))
    handle = watch("match (packed key)", lambda: cache.match(NAMESPACE, key, NUM_TOKENS - 1))
    assert handle.num_tokens == NUM_SHARED
    missing = NUM_TOKENS // BLOCK_SIZE - len(handle.block_ids)
    evicted = watch("evict one leaf of 256 blocks", lambda: cache.evict(missing))
    assert evicted == missing
    table = handle.block_ids + watch("allocate 256 blocks", lambda: cache.allocate(missing))
    result = watch("insert (packed key)", lambda: cache.insert(NAMESPACE, key, table, handle))
    watch("release", lambda: cache.release(result.handle))
    events = watch("drain: hash 256 blocks, list tokens", cache.drain_events)
    for event in events:
        index.apply("worker", event)
    watch("index match, 512 blocks held", lambda: index.match(NAMESPACE, key))
    watch("match (list of 8,192 ints)", lambda: cache.release(cache.match(NAMESPACE, token_ids)))


def evict_many_leaves(cache: RadixCache, shared: list[int], rng: random.Random, watch: Stopwatch) -> None:
    """32 leaves in one call, as a long prompt or a flush does; the time is a leaf's share."""
    cache.flush()
    fill(cache, shared, rng)
    cache.drain_events()
    start = time.perf_counter()
    evicted = cache.evict(32 * 256)
    watch.samples.setdefault("evict 32 such leaves, a leaf", []).append((time.perf_counter() - start) * 1e6 / 32)
    assert evicted == 32 * 256


def fill(cache: RadixCache, shared: list[int], rng: random.Random) -> None:
    """Until the pool is full: tails of 256 blocks below the shared prefix."""
    first = cache.allocate(NUM_SHARED // BLOCK_SIZE)
    cache.release(cache.insert(NAMESPACE, shared, first).handle)
    while cache.pool.num_free:
        token_ids = with_new_tail(shared, rng)
        handle = cache.match(NAMESPACE, token_ids)
        table = handle.block_ids + cache.allocate(256)
        cache.release(cache.insert(NAMESPACE, token_ids, table, handle).handle)


def with_new_tail(shared: list[int], rng: random.Random) -> list[int]:
    return shared + [rng.randrange(50_000) for _ in range(NUM_TOKENS - NUM_SHARED)]


def main() -> None:
    rng = random.Random(0)
    shared = [rng.randrange(50_000) for _ in range(NUM_SHARED)]
    cache = RadixCache(256 * 34, BLOCK_SIZE)
    watch, index = Stopwatch(), PrefixIndex(BLOCK_SIZE)
    fill(cache, shared, rng)
    cache.drain_events()
    for event in cache.snapshot():
        index.apply("worker", event)
    gc.collect()
    for _ in range(ROUNDS):
        one_request(cache, with_new_tail(shared, rng), watch, index)
    for _ in range(30):
        watch("evict one block of a leaf", lambda: cache.evict(1))
    cache.check_integrity()
    for _ in range(ROUNDS // 32):
        evict_many_leaves(cache, shared, rng, watch)
    for name, samples in watch.samples.items():
        ordered = sorted(samples)
        print(
            f"{name:38s} median {statistics.median(ordered):7.1f} us   p95 {ordered[len(ordered) * 95 // 100]:7.1f} us"
        )


if __name__ == "__main__":
    main()
