"""RadixTree: cached prefixes as a compressed trie of whole blocks, with locks and LRU order. It owns no pool.

                 root of a namespace
                /                   \\
     [b7 b8 b9] "system prompt"      [b1] ...       a node holds a run of blocks and their token bytes;
        /             \\                             children are found by the bytes of their first block
     [b4 b5]         [b2]

A node is split where a lookup ends inside it, so a lock covers exactly the blocks it names. A lock counts on its node
and on all ancestors: an unlocked node has only unlocked descendants, hence every unlocked block can be evicted.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from .chain_hash import HashRun
from .token_key import BYTES_PER_TOKEN


class RadixNode:
    """A run of blocks below `parent`. The root of a namespace holds none and has no parent."""

    __slots__ = (
        "block_ids",
        "children",
        "data",
        "last_used",
        "lock_count",
        "namespace",
        "parent",
        "run",
        "run_start",
        "serial",
    )

    def __init__(self, namespace: str, parent: "RadixNode | None", serial: int, run: HashRun) -> None:
        self.namespace = namespace
        self.parent = parent
        self.serial = serial  # breaks ties of last_used the same way in every run
        self.data = b""  # token bytes, as in TokenKey; len(block_ids) blocks
        self.block_ids: list[int] = []
        self.children: dict[bytes, RadixNode] = {}  # token bytes of a child's first block |-> child
        self.lock_count = 0
        self.last_used = 0
        self.run = run  # chain hashes: those of blocks run_start, run_start + 1, ... of the run
        self.run_start = 0


class EvictedBlocks(NamedTuple):
    """Blocks cut off the end of one leaf: their ids, and where their chain hashes are."""

    namespace: str
    block_ids: list[int]
    run: HashRun
    run_start: int


class RadixTree:
    """Structure, locks, LRU order. `tick` counts uses; a path shares the tick of its last use."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * BYTES_PER_TOKEN
        self.roots: dict[str, RadixNode] = {}  # only namespaces that hold something
        self.num_blocks = 0
        self.num_nodes = 0
        self.num_evictable = 0  # blocks in unlocked nodes
        # (last_used, serial, node) of each unlocked leaf, and stale entries: a node that was used, locked or
        # removed since is skipped when it comes up. Rebuilt before the stale ones can outnumber the nodes.
        self.lru: list[tuple[int, int, RadixNode]] = []
        self._tick = 0
        self._serial = 0

    def walk(self, namespace: str, data: bytes, num_blocks: int) -> tuple[RadixNode | None, list[int]]:
        """The longest cached prefix of the first `num_blocks` blocks of `data`: where it ends, and its block ids.

        Splits a node in whose middle the prefix ends. (None, []) when nothing matches.
        """
        root = self.roots.get(namespace)
        if root is None:
            return None, []
        node, block_ids = root, list[int]()
        offset, end = 0, num_blocks * self.block_bytes
        while offset < end:
            child = node.children.get(data[offset : offset + self.block_bytes])
            if child is None:
                break
            shared = self._shared_bytes(child.data, data, offset, end)
            if shared < len(child.data):
                child = self._split(child, shared)
            block_ids += child.block_ids
            offset += shared
            node = child
        return (None if node is root else node), block_ids

    def num_cached_blocks(self, namespace: str, data: bytes, num_blocks: int) -> int:
        """How many blocks `walk` would find. Nothing is split, nor marked as used."""
        node = self.roots.get(namespace)
        offset, end = 0, num_blocks * self.block_bytes
        while node is not None and offset < end:
            child = node.children.get(data[offset : offset + self.block_bytes])
            if child is None:
                break
            shared = self._shared_bytes(child.data, data, offset, end)
            offset += shared
            node = child if shared == len(child.data) else None
        return offset // self.block_bytes

    def attach(self, namespace: str, parent: RadixNode | None, data: bytes, block_ids: list[int]) -> RadixNode:
        """A new leaf below `parent` (None: below the root). The caller has walked: no child starts like it.

        It is in line for eviction once it was locked and unlocked.
        """
        if parent is None:
            parent = self.roots.get(namespace)
        if parent is None:
            parent = self.roots[namespace] = self._new_node(namespace, None, HashRun(b"", self.block_size))
        run = HashRun(data, self.block_size, parent.run, parent.run_start + len(parent.block_ids))
        node = self._new_node(namespace, parent, run)
        node.data, node.block_ids, node.last_used = data, block_ids, self._tick
        parent.children[data[: self.block_bytes]] = node
        self.num_nodes += 1
        self.num_blocks += len(block_ids)
        self.num_evictable += len(block_ids)
        return node

    def lock(self, node: RadixNode) -> None:
        """Counts one more user of the path from the root to the end of `node`, and makes it the last used."""
        self._tick += 1
        while node.parent is not None:
            if node.lock_count == 0:
                self.num_evictable -= len(node.block_ids)
            node.lock_count += 1
            node.last_used = self._tick
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        """Takes back one `lock` of the same node."""
        while node.parent is not None:
            node.lock_count -= 1
            if node.lock_count == 0:
                self.num_evictable += len(node.block_ids)
                self._offer(node)
            node = node.parent

    def cut_lru(self, max_blocks: int) -> EvictedBlocks | None:
        """Removes up to `max_blocks` blocks from the end of the least recently used unlocked leaf.

        None when nothing is unlocked. O(log n) amortised. A leaf that keeps some blocks stays first in line.
        """
        while self.lru and not self.is_current(self.lru[0]):
            heappop(self.lru)
        if not self.lru:
            return None
        leaf = self.lru[0][2]
        keep = max(len(leaf.block_ids) - max_blocks, 0)
        if keep:
            cut_ids = leaf.block_ids[keep:]
            del leaf.block_ids[keep:]
            leaf.data = leaf.data[: keep * self.block_bytes]
        else:
            cut_ids = leaf.block_ids
            heappop(self.lru)
            self._remove(leaf)
        self.num_blocks -= len(cut_ids)
        self.num_evictable -= len(cut_ids)
        return EvictedBlocks(leaf.namespace, cut_ids, leaf.run, leaf.run_start + keep)

    def clear(self) -> None:
        """Forgets everything. The caller has seen that nothing is locked."""
        self.roots.clear()
        self.lru.clear()
        self.num_blocks = self.num_nodes = self.num_evictable = 0

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the roots, parents before children."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    @staticmethod
    def is_current(entry: tuple[int, int, RadixNode]) -> bool:
        """Whether an entry of `lru` still stands for an unlocked leaf of the tree."""
        last_used, _, node = entry
        return node.last_used == last_used and node.lock_count == 0 and not node.children and node.parent is not None

    def _shared_bytes(self, edge: bytes, data: bytes, offset: int, end: int) -> int:
        """Length of the whole blocks that `edge` and data[offset:end] share; the first block is known to be equal."""
        limit = min(len(edge), end - offset)
        if limit == len(edge) and data.startswith(edge, offset):  # a memcmp, without copying
            return limit
        low, high = 1, limit // self.block_bytes  # `low` blocks are shared, more than `high` are not
        while low < high:
            middle = (low + high + 1) // 2
            start, stop = low * self.block_bytes, middle * self.block_bytes
            if edge[start:stop] == data[offset + start : offset + stop]:
                low = middle
            else:
                high = middle - 1
        return low * self.block_bytes

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Puts the first `at` bytes of `node` into a new parent, which is returned.

        `node` stays the lower part: a handle names the end of a prefix, and that does not move.
        """
        assert node.parent is not None
        upper = self._new_node(node.namespace, node.parent, node.run)
        num_upper = at // self.block_bytes
        upper.data, node.data = node.data[:at], node.data[at:]
        upper.block_ids, node.block_ids = node.block_ids[:num_upper], node.block_ids[num_upper:]
        upper.run_start, node.run_start = node.run_start, node.run_start + num_upper
        upper.lock_count, upper.last_used = node.lock_count, node.last_used
        node.parent.children[upper.data[: self.block_bytes]] = upper
        node.parent = upper
        upper.children[node.data[: self.block_bytes]] = node
        self.num_nodes += 1
        return upper

    def _remove(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.data[: self.block_bytes]]
        leaf.parent = None
        self.num_nodes -= 1
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            del self.roots[parent.namespace]

    def _offer(self, node: RadixNode) -> None:
        """Puts `node` in line for eviction if it is an unlocked leaf."""
        if node.children or node.lock_count:
            return
        if len(self.lru) > 2 * self.num_nodes + 16:
            self.lru = [entry for entry in self.lru if self.is_current(entry)]
            heapify(self.lru)
        heappush(self.lru, (node.last_used, node.serial, node))

    def _new_node(self, namespace: str, parent: RadixNode | None, run: HashRun) -> RadixNode:
        self._serial += 1
        return RadixNode(namespace, parent, self._serial, run)
