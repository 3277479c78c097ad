"""check_integrity notices each kind of corruption that is planted here."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.core.errors import LocalProtocolError
from baton.radix_cache.block_pool import BlockState
from baton.radix_cache.cache import PrefixHandle, RadixCache
from baton.radix_cache.chain_hash import HashRun
from baton.radix_cache.radix_tree import RadixNode
from baton.radix_cache.token_key import TokenKey

AB = [1, 1, 2, 2]
AC = [1, 1, 3, 3]
D = [4, 4]


class Planted:
    """A sound cache with the nodes `a` (parent of `b` and `c`) and `d`; `handle` locks a and b. Blocks of 2 tokens."""

    def __init__(self) -> None:
        self.cache = RadixCache(8, 2)
        for token_ids in (AB, AC, D):
            handle = self.cache.match("ns", token_ids)
            table = handle.block_ids + self.cache.allocate(len(token_ids) // 2 - len(handle.block_ids))
            self.cache.release(self.cache.insert("ns", token_ids, table, handle).handle)
        self.handle = self.cache.match("ns", AB)
        self.private = self.cache.allocate(1)
        self.cache.check_integrity()

    @property
    def root(self) -> RadixNode:
        return self.cache.tree.roots["ns"]

    def node(self, *token_ids: int) -> RadixNode:
        node = self.root
        for token_id in token_ids:
            node = node.children[TokenKey([token_id] * 2).data]
        return node

    def replace_handle(self, handle: PrefixHandle) -> None:
        self.cache.handles.remove(self.handle)
        self.cache.handles.add(handle)


def lock_lost(p: Planted) -> None:
    p.node(1).lock_count -= 1


def lock_gained(p: Planted) -> None:
    p.node(4).lock_count += 1


def lock_of_the_node_itself_skipped(p: Planted) -> None:
    p.node(1, 2).lock_count = 0  # RX01


def handle_forgotten(p: Planted) -> None:
    p.cache.handles.clear()


def handle_on_a_removed_node(p: Planted) -> None:
    p.node(1, 2).parent = RadixNode("ns", None, 99, HashRun(b"", 2))


def handle_with_other_blocks(p: Planted) -> None:
    p.handle.block_ids.reverse()


def handle_with_another_length(p: Planted) -> None:
    p.replace_handle(replace(p.handle, num_tokens=3))


def block_in_two_nodes(p: Planted) -> None:
    p.node(4).block_ids[0] = p.node(1).block_ids[0]  # RX07


def block_private_and_in_the_tree(p: Planted) -> None:
    p.node(4).block_ids[0] = p.private[0]


def block_beyond_the_pool(p: Planted) -> None:
    p.node(4).block_ids[0] = 8


def cached_block_freed(p: Planted) -> None:
    p.cache.pool.free_evicted(p.node(4).block_ids)


def cached_block_outside_the_tree(p: Planted) -> None:
    p.cache.pool.move(p.private, BlockState.CACHED)


def block_in_two_states(p: Planted) -> None:
    p.cache.pool._free.append(p.private[0])


def child_under_a_wrong_key(p: Planted) -> None:
    p.root.children[TokenKey([5, 5]).data] = p.root.children.pop(TokenKey([4, 4]).data)


def child_of_two_parents(p: Planted) -> None:
    p.node(4).children[TokenKey([2, 2]).data] = p.node(1, 2)


def child_with_another_parent_link(p: Planted) -> None:
    p.node(1, 3).parent = p.node(4)


def child_of_another_namespace(p: Planted) -> None:
    p.node(4).namespace = "other"


def root_under_another_namespace(p: Planted) -> None:
    p.cache.tree.roots["other"] = p.cache.tree.roots.pop("ns")


def root_without_children(p: Planted) -> None:
    p.cache.tree.roots["other"] = RadixNode("other", None, 99, HashRun(b"", 2))


def root_with_blocks(p: Planted) -> None:
    p.root.block_ids.append(p.private[0])


def tokens_without_blocks(p: Planted) -> None:
    p.node(4).data += TokenKey([9, 9]).data  # RX06


def node_without_blocks(p: Planted) -> None:
    del p.node(4).block_ids[:]


def tokens_changed(p: Planted) -> None:
    node = p.node(1, 3)
    node.parent.children[TokenKey([7, 7]).data] = node.parent.children.pop(node.data)  # type: ignore[union-attr]
    node.data = TokenKey([7, 7]).data


def evictable_miscounted(p: Planted) -> None:
    p.cache.tree.num_evictable += 1


def blocks_miscounted(p: Planted) -> None:
    p.cache.tree.num_blocks -= 1


def nodes_miscounted(p: Planted) -> None:
    p.cache.tree.num_nodes += 1


def leaf_not_in_line(p: Planted) -> None:
    p.cache.tree.lru = [entry for entry in p.cache.tree.lru if entry[2] is not p.node(4)]


def leaf_twice_in_line(p: Planted) -> None:
    node = p.node(4)
    p.cache.tree.lru.append((node.last_used, node.serial, node))


def line_out_of_order(p: Planted) -> None:
    p.cache.tree.lru.reverse()


def child_used_after_its_parent(p: Planted) -> None:
    p.node(1, 2).last_used = p.node(1).last_used + 1


def hashes_of_other_tokens(p: Planted) -> None:
    p.node(4).run = HashRun(TokenKey([6, 6]).data, 2)


def hash_chain_from_the_wrong_parent(p: Planted) -> None:
    p.node(1, 3).run = HashRun(p.node(1, 3).data, 2)


FAULTS = [
    (lock_lost, "locks"),
    (lock_gained, "locks"),
    (lock_of_the_node_itself_skipped, "locks"),
    (handle_forgotten, "locks"),
    (handle_on_a_removed_node, "parent link"),
    (handle_with_other_blocks, "handle's blocks"),
    (handle_with_another_length, "token count"),
    (block_in_two_nodes, "times in the tree"),
    (block_private_and_in_the_tree, "but private"),
    (block_beyond_the_pool, "does not exist"),
    (cached_block_freed, "but free"),
    (cached_block_outside_the_tree, "4 are in the tree"),
    (block_in_two_states, "two states"),
    (child_under_a_wrong_key, "key"),
    (child_of_two_parents, "two parents|parent link"),
    (child_with_another_parent_link, "parent link"),
    (child_of_another_namespace, "another namespace"),
    (root_under_another_namespace, "filed under"),
    (root_without_children, "is empty"),
    (root_with_blocks, "a root holds blocks"),
    (tokens_without_blocks, "tokens for 2.0 blocks and 1"),
    (node_without_blocks, "without blocks"),
    (tokens_changed, "chain hashes"),
    (evictable_miscounted, "evictable"),
    (blocks_miscounted, "blocks counted"),
    (nodes_miscounted, "nodes counted"),
    (leaf_not_in_line, "exactly the unlocked leaves"),
    (leaf_twice_in_line, "twice"),
    (line_out_of_order, "out of order"),
    (child_used_after_its_parent, "after its parent"),
    (hashes_of_other_tokens, "chain hashes"),
    (hash_chain_from_the_wrong_parent, "chain"),
]


@pytest.mark.parametrize(("plant", "message"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_the_fault_is_found(plant: Callable[[Planted], None], message: str) -> None:
    planted = Planted()
    plant(planted)
    with pytest.raises(LocalProtocolError, match=message):
        planted.cache.check_integrity()


def test_a_handle_on_an_evicted_node_is_found() -> None:
    planted = Planted()
    tree = planted.cache.tree
    node = planted.node(1, 2)
    tree.unlock(node)  # the lock is gone, the handle is not
    planted.cache.evict(8)
    with pytest.raises(LocalProtocolError, match="handle"):
        planted.cache.check_integrity()
