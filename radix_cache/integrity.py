"""check_cache: recounts a RadixCache from nothing and compares. What a test or an idle worker calls."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..core.errors import LocalProtocolError
from .block_pool import BlockPool, BlockState
from .chain_hash import ROOT_HASH, chain_hashes
from .radix_tree import RadixNode, RadixTree
from .token_key import unpack_token_ids

if TYPE_CHECKING:
    from .cache import PrefixHandle


def check_cache(pool: BlockPool, tree: RadixTree, handles: "Iterable[PrefixHandle]") -> None:
    """Raises LocalProtocolError that names the first disagreement found."""
    pool.check_integrity()
    nodes = _check_links(tree)
    _check_blocks(pool, nodes)
    _check_locks(tree, nodes, handles)
    _check_totals(tree, nodes)
    _check_eviction_order(tree, nodes)
    _check_hashes(tree)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LocalProtocolError(f"radix cache is corrupt: {message}; this is a bug, please report it")


def _check_links(tree: RadixTree) -> list[RadixNode]:
    """Every node hangs where its tokens say, exactly once. Returns all nodes but the roots."""
    nodes: list[RadixNode] = []
    seen: set[int] = set()
    stack = list(tree.roots.values())
    for namespace, root in tree.roots.items():
        _require(root.namespace == namespace, f"root of {root.namespace!r} is filed under {namespace!r}")
        _require(root.parent is None and not root.block_ids and not root.data, "a root holds blocks")
        _require(bool(root.children), f"the root of {namespace!r} is empty")
    while stack:
        parent = stack.pop()
        for first_block, node in parent.children.items():
            _require(id(node) not in seen, "a node hangs below two parents")
            seen.add(id(node))
            _require(node.parent is parent, "a child's parent link points elsewhere")
            _require(node.namespace == parent.namespace, "a child is of another namespace")
            _require(first_block == node.data[: tree.block_bytes], "a child's key is not its first block")
            _require(len(node.block_ids) > 0, "a node without blocks")
            _require(
                len(node.data) == len(node.block_ids) * tree.block_bytes,
                f"a node has tokens for {len(node.data) / tree.block_bytes} blocks and {len(node.block_ids)} blocks",
            )
            _require(node.last_used <= parent.last_used or parent.parent is None, "a child was used after its parent")
            nodes.append(node)
            stack.append(node)
    return nodes


def _check_blocks(pool: BlockPool, nodes: list[RadixNode]) -> None:
    owners = Counter(block_id for node in nodes for block_id in node.block_ids)
    for block_id, num_owners in owners.items():
        _require(num_owners == 1, f"block {block_id} is {num_owners} times in the tree")
        state = pool.state(block_id)
        _require(state is BlockState.CACHED, f"block {block_id} is in the tree but {state.value}")
    num_cached = pool.counts().cached
    _require(num_cached == len(owners), f"{num_cached} blocks are cached, {len(owners)} are in the tree")


def _check_locks(tree: RadixTree, nodes: list[RadixNode], handles: "Iterable[PrefixHandle]") -> None:
    expected: Counter[int] = Counter()
    alive = {id(node) for node in nodes}
    for handle in handles:
        path: list[RadixNode] = []
        node = handle.node
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        _require(all(id(step) in alive for step in path), "a handle points to a node that left the tree")
        expected.update(id(step) for step in path)
        held = [block_id for step in reversed(path) for block_id in step.block_ids]
        _require(held == handle.block_ids, "a handle's blocks are not those on its path")
        _require(handle.num_tokens == len(held) * tree.block_size, "a handle's token count is wrong")
    for node in nodes:
        count = expected[id(node)]
        _require(node.lock_count == count, f"a node counts {node.lock_count} locks, handles hold {count}")


def _check_totals(tree: RadixTree, nodes: list[RadixNode]) -> None:
    num_blocks = sum(len(node.block_ids) for node in nodes)
    num_evictable = sum(len(node.block_ids) for node in nodes if node.lock_count == 0)
    _require(tree.num_nodes == len(nodes), f"{tree.num_nodes} nodes counted, {len(nodes)} found")
    _require(tree.num_blocks == num_blocks, f"{tree.num_blocks} blocks counted, {num_blocks} found")
    _require(tree.num_evictable == num_evictable, f"{tree.num_evictable} blocks counted evictable, {num_evictable} are")


def _check_eviction_order(tree: RadixTree, nodes: list[RadixNode]) -> None:
    keys = [entry[:2] for entry in tree.lru]
    _require(all(keys[(i - 1) // 2] <= keys[i] for i in range(1, len(keys))), "the LRU heap is out of order")
    in_line = Counter(id(entry[2]) for entry in tree.lru if tree.is_current(entry))
    leaves = {id(node) for node in nodes if node.lock_count == 0 and not node.children}
    _require(set(in_line) == leaves, "the LRU heap does not hold exactly the unlocked leaves")
    _require(all(count == 1 for count in in_line.values()), "a leaf is twice in the LRU heap")


def _check_hashes(tree: RadixTree) -> None:
    """Each node's hashes are those of its tokens below its parent's last hash."""
    last_hash: dict[int, int] = {id(root): ROOT_HASH for root in tree.roots.values()}
    for node in tree.nodes():
        assert node.parent is not None
        expected = chain_hashes(unpack_token_ids(node.data), tree.block_size, last_hash[id(node.parent)])
        actual = node.run.hashes(node.run_start, node.run_start + len(node.block_ids))
        _require(actual == expected, "a node's chain hashes are not those of its tokens")
        _require(node.run.hash_before(node.run_start) == last_hash[id(node.parent)], "a hash chain is broken")
        last_hash[id(node)] = expected[-1]
