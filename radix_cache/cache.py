"""RadixCache: the pool and the tree together. Who computed a prefix leaves it here; who needs it finds and locks it.

Life of a request's blocks, as its worker sees it:

    handle = cache.match(namespace, key, limit=num_prompt_tokens - 1)     the cached prefix, locked
    new    = cache.allocate(n)                                            PRIVATE; evicts what is needed
    ...compute...; table = handle.block_ids + new
    result = cache.insert(namespace, key, table, handle)                  new blocks become CACHED, all locked
    table  = result.canonical_block_ids                                   remap first,
    cache.pool.free(result.duplicate_block_ids)                           then free what another request had cached
    ...go on decoding with result.handle as `handle`, or...
    cache.release(result.handle); cache.pool.free(partial last block)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.cache_events import CacheEvent, Stored
from ..core.errors import LocalProtocolError, OutOfBlocks
from ..core.layout import BLOCK_SIZES
from ..core.ledger import Ledger
from .block_pool import BlockPool, BlockState
from .event_log import EventLog, snapshot
from .integrity import check_cache
from .radix_tree import RadixNode, RadixTree
from .token_key import TokenKey


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHandle:
    """A locked prefix of whole blocks: none of them is evicted until the handle is released. May be empty."""

    namespace: str
    num_tokens: int
    block_ids: list[int]
    node: RadixNode | None  # where the prefix ends; None for the empty prefix


@dataclass(frozen=True, slots=True)
class InsertResult:
    """`canonical_block_ids`: the caller's table with each duplicate replaced by the tree's block, same length.
    `duplicate_block_ids`: the caller's blocks that were replaced; still PRIVATE, the caller's to free after remapping.
    `handle`: lock on everything inserted; takes the place of the handle that was passed in.
    """

    canonical_block_ids: list[int]
    duplicate_block_ids: list[int]
    handle: PrefixHandle


class RadixCache:
    """Prefix cache over `num_blocks` blocks of `block_size` tokens. One thread. Every call takes a namespace.

    What a call costs is measured by scripts/bench_radix_cache.py.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size {block_size} is not one of {BLOCK_SIZES}")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(block_size)
        self.handles: set[PrefixHandle] = set()  # not yet released
        self._events = EventLog(max_blocks=4 * num_blocks + 1024)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give now: free and evictable ones. O(1)."""
        return self.pool.num_free + self.tree.num_evictable

    def match(self, namespace: str, token_ids: TokenKey | Sequence[int], limit: int | None = None) -> PrefixHandle:
        """The longest cached prefix in whole blocks of at most `limit` tokens, locked and marked as last used.

        A caller who must have a token left to compute (and logits to sample from) passes num_tokens - 1.
        """
        key = TokenKey.of(token_ids)
        num_tokens = key.num_tokens if limit is None else min(limit, key.num_tokens)
        node, block_ids = self.tree.walk(namespace, key.data, num_tokens // self.block_size)
        return self._lock(namespace, node, block_ids)

    def num_cached_tokens(self, namespace: str, token_ids: TokenKey | Sequence[int], limit: int | None = None) -> int:
        """The length of what `match` would find, without a lock and without a trace: it may be gone at once."""
        key = TokenKey.of(token_ids)
        num_tokens = key.num_tokens if limit is None else min(limit, key.num_tokens)
        return self.block_size * self.tree.num_cached_blocks(namespace, key.data, num_tokens // self.block_size)

    def release(self, handle: PrefixHandle) -> None:
        """Unlocks. Raises LocalProtocolError if `handle` was released before or is not of this cache."""
        if handle not in self.handles:
            raise LocalProtocolError(f"handle of {handle.num_tokens} tokens is not held: released twice?")
        self.handles.remove(handle)
        if handle.node is not None:
            self.tree.unlock(handle.node)

    def insert(
        self,
        namespace: str,
        token_ids: TokenKey | Sequence[int],
        block_ids: Sequence[int],
        handle: PrefixHandle | None = None,
    ) -> InsertResult:
        """Caches the whole blocks of `token_ids`, whose KV is final and stands in `block_ids`.

        The first blocks are those of `handle` (from `match` or an earlier insert), the others are the caller's and
        PRIVATE. New ones become CACHED; where the tree has the same tokens in other blocks, the tree's are used from
        now on. A partial last block, and any block after it, stays the caller's. `handle` is released: the result's
        takes its place. Raises LocalProtocolError, with nothing changed, when blocks or handle do not fit the tokens.
        """
        key = TokenKey.of(token_ids)
        num_blocks = key.num_tokens // self.block_size
        num_held = self._check_insert(namespace, num_blocks, block_ids, handle)
        node, canonical = self.tree.walk(namespace, key.data, num_blocks)
        num_known = len(canonical)
        if num_held and canonical[:num_held] != list(block_ids[:num_held]):
            raise LocalProtocolError("the first tokens or blocks are not those of the handle: was a token changed?")
        duplicates, new = list(block_ids[num_held:num_known]), list(block_ids[num_known:num_blocks])
        self._check_duplicates(duplicates, new)
        if new:
            self.pool.move(new, BlockState.CACHED)
            data = key.data[num_known * self.tree.block_bytes : num_blocks * self.tree.block_bytes]
            node = self.tree.attach(namespace, node, data, new)
            self._events.record_stored(node)
            canonical += new
        kept = self._lock(namespace, node, canonical)
        if handle is not None:
            self.release(handle)
        return InsertResult([*canonical, *block_ids[num_blocks:]], duplicates, kept)

    def allocate(self, n: int, state: BlockState = BlockState.PRIVATE) -> list[int]:
        """`n` blocks, evicting only as many as are missing. Raises OutOfBlocks having evicted nothing."""
        if n > self.num_available:
            raise OutOfBlocks(
                f"{n} blocks wanted, {self.pool.num_free} are free and {self.tree.num_evictable} evictable "
                f"of {self.pool.num_blocks}: wait until running requests release theirs"
            )
        if n > self.pool.num_free:
            self.evict(n - self.pool.num_free)
        return self.pool.allocate(n, state)

    def evict(self, n_blocks: int) -> int:
        """Frees up to `n_blocks` unlocked blocks, least recently used leaves first, each from its end."""
        evicted = 0
        while evicted < n_blocks and (cut := self.tree.cut_lru(n_blocks - evicted)) is not None:
            self.pool.free_evicted(cut.block_ids)
            self._events.record_evicted(cut)
            evicted += len(cut.block_ids)
        return evicted

    def flush(self) -> int:
        """Evicts everything unlocked; returns the number of blocks freed."""
        num_blocks = self.tree.num_blocks
        if self.tree.num_evictable < num_blocks:
            return self.evict(num_blocks)
        if num_blocks:
            self.pool.free_evicted([b for node in self.tree.nodes() for b in node.block_ids])
            self.tree.clear()
            self._events.record_cleared()
        return num_blocks

    def drain_events(self) -> list[CacheEvent]:
        """What changed since the last drain, in order. Chain hashes are computed here (0.4 us a block)."""
        return self._events.drain(self.tree)

    def snapshot(self) -> list[Stored]:
        """The whole tree as Stored events, parents first. It does not drain."""
        return snapshot(self.tree)

    def check_integrity(self) -> None:
        """Recounts everything; raises LocalProtocolError that names the first thing found wrong. O(cache)."""
        check_cache(self.pool, self.tree, self.handles)

    def ledger(self) -> Ledger:
        """The blocks by state and the locks outstanding; the worker fills in its own counts, which are 0 here."""
        counts = self.pool.counts()
        return Ledger(
            total=counts.total,
            free=counts.free,
            reserved=counts.reserved,
            private=counts.private,
            cached=counts.cached,
            quarantined=counts.quarantined,
            locks=len(self.handles),
            requests=0,
            senders=0,
            receivers=0,
            ring_slots_in_use=0,
        )

    def _lock(self, namespace: str, node: RadixNode | None, block_ids: list[int]) -> PrefixHandle:
        if node is not None:
            self.tree.lock(node)
        handle = PrefixHandle(namespace, len(block_ids) * self.block_size, block_ids, node)
        self.handles.add(handle)
        return handle

    def _check_insert(
        self, namespace: str, num_blocks: int, block_ids: Sequence[int], handle: PrefixHandle | None
    ) -> int:
        """The number of blocks that `handle` holds."""
        if len(block_ids) < num_blocks:
            raise LocalProtocolError(f"tokens fill {num_blocks} blocks, but only {len(block_ids)} are given")
        if handle is None:
            return 0
        if handle not in self.handles or handle.namespace != namespace:
            raise LocalProtocolError("the handle is released, or of another cache or namespace")
        if len(handle.block_ids) > num_blocks:
            raise LocalProtocolError(f"the handle holds {handle.num_tokens} tokens, more than are inserted")
        return len(handle.block_ids)

    def _check_duplicates(self, duplicates: list[int], new: list[int]) -> None:
        """Not PRIVATE means: the tree's own block was passed without the handle that locks it."""
        if not duplicates:
            return
        wrong = [b for b in duplicates if self.pool.state(b) is not BlockState.PRIVATE]
        if wrong or len({*duplicates, *new}) != len(duplicates) + len(new):
            raise LocalProtocolError(f"blocks {wrong or duplicates} are not private to the caller, or named twice")
