"""BlockPool: who owns each block of the KV cache. Every block is in exactly one state (design decision 9).

FREE ──allocate──▶ RESERVED ──move──▶ PRIVATE ──move──▶ CACHED ──free_evicted──▶ FREE
  └────allocate──────────────────────▶┘
RESERVED, PRIVATE ──move──▶ QUARANTINED        RESERVED, PRIVATE, QUARANTINED ──free──▶ FREE
"""

from collections.abc import Sequence
from enum import Enum

import msgspec

from ..core.errors import LocalProtocolError, OutOfBlocks


class BlockState(Enum):
    FREE = "free"
    RESERVED = "reserved"  # granted to a hand-over, its content not committed yet
    PRIVATE = "private"  # in block tables of running sequences only
    CACHED = "cached"  # in exactly one node of the radix tree
    QUARANTINED = "quarantined"  # somebody gone may still write to it


_ALLOCATED = (BlockState.RESERVED, BlockState.PRIVATE)
_SOURCES: dict[BlockState, tuple[BlockState, ...]] = {  # target |-> states from which `move` may reach it
    BlockState.PRIVATE: (BlockState.RESERVED,),
    BlockState.CACHED: (BlockState.PRIVATE,),
    BlockState.QUARANTINED: (BlockState.RESERVED, BlockState.PRIVATE),
}
_FREEABLE = (BlockState.RESERVED, BlockState.PRIVATE, BlockState.QUARANTINED)


class BlockCounts(msgspec.Struct, frozen=True):
    """Blocks by state. They add up to `total`, the size of the pool."""

    free: int
    reserved: int
    private: int
    cached: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.reserved + self.private + self.cached + self.quarantined


class BlockPool:
    """Block ids 0 to num_blocks - 1 and their states. A call that raises has changed nothing.

    The owned states are sets of block ids: moving many blocks is a few calls in C, with no Python loop.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._owned: dict[BlockState, set[int]] = {s: set() for s in BlockState if s is not BlockState.FREE}
        self._cached = self._owned[BlockState.CACHED]
        # A stack: the block freed last is given out first. Reversed, so that a new pool gives 0, 1, 2, ...
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def state(self, block_id: int) -> BlockState:
        """Raises LocalProtocolError if there is no such block."""
        if not 0 <= block_id < self.num_blocks:
            raise LocalProtocolError(f"block {block_id} does not exist: the pool has {self.num_blocks}")
        return next((state for state, owned in self._owned.items() if block_id in owned), BlockState.FREE)

    def allocate(self, n: int, state: BlockState = BlockState.PRIVATE) -> list[int]:
        """Takes `n` free blocks, which become RESERVED or PRIVATE. O(n). Raises OutOfBlocks if fewer are free."""
        if n < 0 or state not in _ALLOCATED:
            raise LocalProtocolError(f"cannot allocate {n} blocks as {state.value}")
        if n > len(self._free):
            raise OutOfBlocks(f"{n} blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        block_ids = self._free[: -n - 1 : -1]
        del self._free[len(self._free) - n :]
        self._owned[state].update(block_ids)
        return block_ids

    def move(self, block_ids: Sequence[int], state: BlockState) -> None:
        """Puts owned blocks into `state`, along the arrows of this module's drawing; other moves raise."""
        self._take(block_ids, _SOURCES.get(state, ()), state)
        self._owned[state].update(block_ids)

    def free(self, block_ids: Sequence[int]) -> None:
        """Gives RESERVED, PRIVATE or QUARANTINED blocks back; a free or a cached block raises LocalProtocolError.

        A cached block belongs to the tree: who used it releases the handle, and only eviction frees it.
        """
        self._take(block_ids, _FREEABLE, BlockState.FREE)
        self._free.extend(reversed(block_ids))

    def free_evicted(self, block_ids: Sequence[int]) -> None:
        """CACHED -> FREE, for the tree's own evictions: the fast way, which notices a wrong block only afterwards."""
        num_left = len(self._cached) - len(block_ids)
        self._cached.difference_update(block_ids)
        if len(self._cached) != num_left:
            raise LocalProtocolError("the radix tree evicted blocks that are not cached; this is a bug")
        self._free.extend(reversed(block_ids))

    def counts(self) -> BlockCounts:
        return BlockCounts(len(self._free), **{state.value: len(owned) for state, owned in self._owned.items()})

    def check_integrity(self) -> None:
        """Raises LocalProtocolError unless each block is free or in one of the owned states, exactly once."""
        block_ids = [*self._free, *(block_id for owned in self._owned.values() for block_id in owned)]
        if sorted(block_ids) != list(range(self.num_blocks)):
            raise LocalProtocolError("block pool: a block is lost, or is in two states at once")

    def _take(self, block_ids: Sequence[int], sources: tuple[BlockState, ...], target: BlockState) -> None:
        """Takes distinct blocks out of the states `sources`, all or none."""
        distinct = elsewhere = set(block_ids)
        for source in sources:
            elsewhere = elsewhere - self._owned[source]
        if len(distinct) != len(block_ids) or elsewhere:
            raise self._illegal(block_ids, sources, target)
        for source in sources:
            self._owned[source] -= distinct

    def _illegal(
        self, block_ids: Sequence[int], sources: tuple[BlockState, ...], target: BlockState
    ) -> LocalProtocolError:
        found: dict[int, str] = {}
        for block_id in block_ids:
            if block_id in found:
                return LocalProtocolError(f"block {block_id} is named twice in one move to {target.value}")
            inside = 0 <= block_id < self.num_blocks
            found[block_id] = self.state(block_id).value if inside else "not in the pool"
        legal = [source.value for source in sources]
        wrong = ", ".join(f"{block_id} ({state})" for block_id, state in found.items() if state not in legal)
        return LocalProtocolError(
            f"cannot become {target.value}: {wrong}; only {' or '.join(legal) or 'no'} blocks may"
        )
