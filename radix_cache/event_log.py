"""EventLog: what changed in the tree since the last drain. Hashes and token lists are made when drained."""

from typing import NamedTuple

from ..core.cache_events import CacheEvent, Cleared, Evicted, Stored
from .chain_hash import HashRun
from .radix_tree import EvictedBlocks, RadixNode, RadixTree
from .token_key import unpack_token_ids


class _StoredRun(NamedTuple):
    namespace: str
    run: HashRun
    data: bytes


class EventLog:
    """Events in the order in which they happened, bounded.

    If nobody drains, the log would outgrow the tree it describes. Past `max_blocks` blocks it is dropped, and the next
    drain says Cleared followed by the whole tree, which means the same to a reader.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._pending: list[_StoredRun | EvictedBlocks | Cleared] = []
        self._num_blocks = 0
        self._overflowed = False

    def record_stored(self, node: RadixNode) -> None:
        """`node` is new: it holds the whole of its run."""
        self._append(_StoredRun(node.namespace, node.run, node.data), node.run.num_blocks)

    def record_evicted(self, cut: EvictedBlocks) -> None:
        self._append(cut, len(cut.block_ids))

    def record_cleared(self) -> None:
        self._append(Cleared(), 1)

    def drain(self, tree: RadixTree) -> list[CacheEvent]:
        """Everything since the last drain. Neighbouring evictions of one namespace become one event."""
        pending, overflowed = self._pending, self._overflowed
        self._pending, self._num_blocks, self._overflowed = [], 0, False
        if overflowed:
            return [Cleared(), *snapshot(tree)]
        events: list[CacheEvent] = []
        for change in pending:
            match change:
                case _StoredRun(namespace, run, data):
                    hashes = run.hashes(0, run.num_blocks)
                    events.append(Stored(namespace, run.hash_before(0), hashes, unpack_token_ids(data)))
                case EvictedBlocks(namespace, block_ids, run, start):
                    hashes = run.hashes(start, start + len(block_ids))
                    if events and isinstance(events[-1], Evicted) and events[-1].namespace == namespace:
                        events[-1].hashes.extend(hashes)  # the list was made in this loop
                    else:
                        events.append(Evicted(namespace, hashes))
                case Cleared():
                    events.append(change)
        return events

    def _append(self, change: _StoredRun | EvictedBlocks | Cleared, num_blocks: int) -> None:
        if self._overflowed:
            return
        self._pending.append(change)
        self._num_blocks += num_blocks
        if self._num_blocks > self._max_blocks:
            self._pending.clear()
            self._overflowed = True


def snapshot(tree: RadixTree) -> list[Stored]:
    """The whole tree as events, parents first."""
    events = []
    for node in tree.nodes():
        hashes = node.run.hashes(node.run_start, node.run_start + len(node.block_ids))
        parent = node.run.hash_before(node.run_start)
        events.append(Stored(node.namespace, parent, hashes, unpack_token_ids(node.data)))
    return events
