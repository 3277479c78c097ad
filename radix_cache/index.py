"""PrefixIndex: which worker caches which prefix, as the gateway knows it from the workers' events.

A hint (design decision 10): a wrong entry costs time, never correctness. Pure; no clock, no I/O. Its size is that of
the workers' caches, for each entry was announced by a worker and leaves with its block or its worker.
"""

from collections.abc import Sequence

from ..core.cache_events import CacheEvent, Cleared, Evicted, Stored
from .chain_hash import iter_chain_hashes
from .token_key import TokenKey


class PrefixIndex:
    """For workers of one block size. Workers are named by their id; one that is not known holds nothing."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._holders: dict[str, dict[int, int]] = {}  # namespace |-> chain hash |-> bits of the workers
        self._held: dict[str, dict[str, set[int]]] = {}  # worker |-> namespace |-> chain hashes
        self._bits: dict[str, int] = {}  # worker |-> its bit, a power of two

    def __len__(self) -> int:
        """Prefixes known, each counted once however many workers hold it."""
        return sum(len(holders) for holders in self._holders.values())

    def apply(self, worker: str, event: CacheEvent) -> None:
        """Takes over one event of `worker`. Events of one worker must come in order; repeats do no harm."""
        match event:
            case Stored(namespace=namespace, hashes=hashes):
                self._add(worker, namespace, hashes)
            case Evicted(namespace=namespace, hashes=hashes):
                self._discard(worker, namespace, hashes)
            case Cleared():
                self.remove_worker(worker)

    def remove_worker(self, worker: str) -> None:
        """Forgets all that `worker` holds; nothing happens if it is unknown."""
        for namespace, hashes in list(self._held.get(worker, {}).items()):
            self._discard(worker, namespace, list(hashes))

    def match(self, namespace: str, token_ids: TokenKey | Sequence[int]) -> dict[str, int]:
        """Worker |-> cached tokens, of those that hold at least the first block. One walk for all workers.

        Costs 0.6 us a block until no worker is left. Workers apply their own limit (a token left to sample from).
        """
        holders = self._holders.get(namespace)
        if holders is None:
            return {}
        matched: dict[str, int] = {}
        alive, num_tokens = sum(self._bits.values()), 0
        for chain_hash in iter_chain_hashes(TokenKey.of(token_ids).data, self.block_size):
            still = alive & holders.get(chain_hash, 0)
            if still != alive and num_tokens:
                matched.update(dict.fromkeys(self._workers(alive & ~still), num_tokens))
            alive = still
            if not alive:
                break
            num_tokens += self.block_size
        if num_tokens:
            matched.update(dict.fromkeys(self._workers(alive), num_tokens))
        return matched

    def _workers(self, bits: int) -> list[str]:
        return [worker for worker, bit in self._bits.items() if bits & bit]

    def _add(self, worker: str, namespace: str, hashes: list[int]) -> None:
        if not hashes:
            return
        bit = self._bits.get(worker)
        if bit is None:
            used = sum(self._bits.values())
            bit = self._bits[worker] = ~used & (used + 1)  # the lowest bit that nobody has
        self._held.setdefault(worker, {}).setdefault(namespace, set()).update(hashes)
        holders = self._holders.setdefault(namespace, {})
        for chain_hash in hashes:
            holders[chain_hash] = holders.get(chain_hash, 0) | bit

    def _discard(self, worker: str, namespace: str, hashes: list[int]) -> None:
        """Forgets these, and every container that thereby becomes empty."""
        namespaces = self._held.get(worker, {})
        held = namespaces.get(namespace)
        if held is None:
            return
        holders, others = self._holders[namespace], ~self._bits[worker]
        for chain_hash in held.intersection(hashes):
            holders[chain_hash] &= others
            if not holders[chain_hash]:
                del holders[chain_hash]
        held.difference_update(hashes)
        if not holders:
            del self._holders[namespace]
        if not held:
            del namespaces[namespace]
        if not namespaces:
            del self._held[worker], self._bits[worker]


class PrefixIndexes:
    """One PrefixIndex for each block size in the fleet, behind the same calls."""

    def __init__(self) -> None:
        self._indexes: dict[int, PrefixIndex] = {}
        self._block_sizes: dict[str, int] = {}  # worker |-> block size

    def add_worker(self, worker: str, block_size: int) -> None:
        """Must come before the worker's events. A worker that comes back starts with nothing."""
        self.remove_worker(worker)
        self._block_sizes[worker] = block_size
        self._indexes.setdefault(block_size, PrefixIndex(block_size))

    def remove_worker(self, worker: str) -> None:
        """Forgets the worker; nothing happens if it is unknown."""
        block_size = self._block_sizes.pop(worker, None)
        if block_size is None:
            return
        self._indexes[block_size].remove_worker(worker)
        if block_size not in self._block_sizes.values():
            del self._indexes[block_size]

    def apply(self, worker: str, event: CacheEvent) -> None:
        """As PrefixIndex.apply; the late event of a worker that left is dropped."""
        block_size = self._block_sizes.get(worker)
        if block_size is not None:
            self._indexes[block_size].apply(worker, event)

    def match(self, namespace: str, token_ids: TokenKey | Sequence[int]) -> dict[str, int]:
        """Worker |-> cached tokens, over all block sizes."""
        key = TokenKey.of(token_ids)
        matched: dict[str, int] = {}
        for index in self._indexes.values():
            matched |= index.match(namespace, key)
        return matched
