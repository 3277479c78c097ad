"""Which blocks a sequence holds, and how they come and go. The only place where ownership of blocks changes hands."""

from array import array
from collections import deque
from collections.abc import Iterable

from ..core.errors import OutOfBlocks
from ..core.lifecycle import Phase
from ..core.sequence import Sequence
from ..radix_cache.block_pool import BlockState
from ..radix_cache.cache import PrefixHandle, RadixCache


class SequenceBlocks:
    """Blocks of all sequences of one worker. A sequence's block table has two regions:

    [0, n)      cached: owned by the radix tree, locked by the sequence's handle; full and final
    [n, end)    the sequence's own (reserved while a hand-over fills them, else private)

    n is `handle.num_tokens // block_size`. Publishing moves n to the right. A table is changed in place, never
    replaced: a hand-over in progress reads it too.

    A step in flight still reads and writes the blocks its sequences had when it was launched. So blocks that are given
    up meanwhile stay private until every step that was launched before is collected: a hand-over, which the device does
    not put in order with steps, could write into them otherwise. Cached blocks need no such care: nobody writes them,
    and who only reads them in vain has ended.
    """

    def __init__(self, cache: RadixCache, block_size: int):
        self.cache = cache
        self._block_size = block_size
        self._handles: dict[str, PrefixHandle] = {}
        self._num_launched = 0  # steps, of all roles
        self._in_flight: set[int] = set()  # numbers of steps
        self._given_up: deque[tuple[int, list[int]]] = deque()  # (steps launched before, block ids)

    def step_launched(self) -> int:
        """A step uses the sequences' blocks from now on; returns its number for `step_collected`."""
        self._num_launched += 1
        self._in_flight.add(self._num_launched)
        return self._num_launched

    def step_collected(self, number: int) -> None:
        """The step is over: blocks that waited for it, and for nothing older, are free."""
        self._in_flight.remove(number)
        oldest = min(self._in_flight, default=self._num_launched + 1)
        while self._given_up and self._given_up[0][0] < oldest:
            self.cache.pool.free(self._given_up.popleft()[1])

    def _give_up(self, block_ids: list[int]) -> None:
        if self._in_flight:
            self._given_up.append((self._num_launched, block_ids))
        else:
            self.cache.pool.free(block_ids)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def acquire(self, sequence: Sequence, room: int, state: BlockState, headroom: int = 0) -> bool:
        """Lock the longest cached prefix and allocate blocks for `room` tokens in all; False if they are not there.

        `headroom` blocks must stay available for the sequences that already run, or the newcomer would be preempted
        at once. At least one token is left uncomputed, so that there is something to sample from. On success
        `num_computed_tokens` is the length of the prefix found.
        """
        handle = self.cache.match(sequence.namespace, sequence.token_ids, limit=sequence.cache_limit)
        if not self._take(sequence, handle, room, state, headroom):
            return False
        sequence.num_computed_tokens = handle.num_tokens
        return True

    def fork(self, source: Sequence, sequence: Sequence, room: int, headroom: int = 0) -> bool:
        """Give a sequence without blocks the KV that `source` has of all its tokens; False if blocks are not there.

            source        A B C D . .       full blocks A B C are shared: locked once more
            sequence      A B C d           of the partial one the caller makes a copy, D -> d, before it is written to

        `source` begins with the same tokens and has them computed and published. Blocks for `room` tokens in all.
        """
        assert source.num_computed_tokens >= sequence.num_tokens
        handle = self.cache.match(sequence.namespace, sequence.token_ids)
        assert len(handle.block_ids) == sequence.num_tokens // self._block_size
        if not self._take(sequence, handle, room, BlockState.PRIVATE, headroom):
            return False
        sequence.num_computed_tokens = sequence.num_tokens
        return True

    def _take(self, sequence: Sequence, handle: PrefixHandle, room: int, state: BlockState, headroom: int) -> bool:
        """The locked prefix, and blocks behind it up to `room` tokens; or neither."""
        assert not sequence.block_table
        num_own = self._num_blocks(room) - len(handle.block_ids)
        if num_own + headroom > self.cache.num_available:
            self.cache.release(handle)
            return False
        own = self.cache.allocate(num_own, state)
        self._handles[sequence.request_id] = handle
        sequence.block_table[:] = array("i", [*handle.block_ids, *own])
        return True

    def num_uncached_tokens(self, sequence: Sequence) -> int:
        """Tokens of a sequence without blocks that no cached prefix holds now; at least one."""
        num_cached = self.cache.num_cached_tokens(sequence.namespace, sequence.token_ids, sequence.cache_limit)
        return sequence.num_tokens - num_cached

    def lacking_blocks(self, sequence: Sequence, room: int, headroom: int) -> int:
        """How many blocks more must be available for `acquire` to succeed."""
        handle = self.cache.match(sequence.namespace, sequence.token_ids, limit=sequence.cache_limit)
        num_wanted = self._num_blocks(room) - len(handle.block_ids) + headroom
        lacking = max(0, num_wanted - self.cache.num_available)  # with the prefix locked: it must not be evicted
        self.cache.release(handle)
        return lacking

    def num_uncached_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence without any would be allocated for the tokens it has."""
        num_cached = sequence.num_tokens - self.num_uncached_tokens(sequence)
        return self._num_blocks(sequence.num_tokens) - num_cached // self._block_size

    def is_being_computed(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Does one of `others` compute the next block of this sequence right now? Waiting saves computing it twice.

        The wait is short: computed chunks are published, so each step of the other one makes the cached prefix longer,
        until it ends or the two part.
        """
        handle = self.cache.match(sequence.namespace, sequence.token_ids, limit=sequence.cache_limit)
        self.cache.release(handle)
        stop = handle.num_tokens + self._block_size
        if stop > sequence.cache_limit:
            return False
        prefix = sequence.token_ids[:stop]
        return any(
            other.phase is Phase.COMPUTING
            and other.namespace == sequence.namespace
            and other.token_ids[:stop] == prefix
            for other in others
        )

    def missing_blocks(self, sequence: Sequence, room: int) -> int:
        """How many blocks the sequence lacks to hold `room` tokens."""
        return max(0, self._num_blocks(room) - len(sequence.block_table))

    def room(self, sequence: Sequence) -> int:
        """How many tokens its blocks hold."""
        return len(sequence.block_table) * self._block_size

    def grow(self, sequence: Sequence, room: int) -> bool:
        """Make the table hold `room` tokens; False if there is no block to be had."""
        missing = self.missing_blocks(sequence, room)
        if missing == 0:
            return True
        try:
            sequence.block_table.extend(self.cache.allocate(missing, BlockState.PRIVATE))
        except OutOfBlocks:
            return False
        return True

    def settle(self, sequence: Sequence) -> None:
        """The hand-over is over, well or not: what was reserved for it is the sequence's own now."""
        self.cache.pool.move(self._own_blocks(sequence), BlockState.PRIVATE)

    def publish(self, sequence: Sequence) -> None:
        """Put the full computed blocks into the radix tree and keep them locked.

        Where the tree already holds the same tokens under other blocks, the table is pointed at those before the
        sequence's duplicates are freed: nobody reads a freed block.
        """
        num_full = sequence.num_computed_tokens // self._block_size
        handle = self._handles[sequence.request_id]
        if num_full * self._block_size <= handle.num_tokens:
            return
        num_tokens = num_full * self._block_size
        result = self.cache.insert(sequence.namespace, sequence.token_ids[:num_tokens], sequence.block_table, handle)
        sequence.block_table[:] = array("i", result.canonical_block_ids)
        self._handles[sequence.request_id] = result.handle
        self._give_up(result.duplicate_block_ids)

    def keep_only(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back all blocks but those of the first `num_tokens` tokens; what was computed stays behind as cache.

        The last of them may be partial, or have been filled up and cached since; either way it holds those tokens, to
        `fork` from. The sequence must not grow any more.
        """
        self.publish(sequence)
        num_kept, num_cached = self._num_blocks(num_tokens), len(self._handles[sequence.request_id].block_ids)
        limit = min(num_kept, num_cached) * self._block_size
        handle = self.cache.match(sequence.namespace, sequence.token_ids, limit)
        self.cache.release(self._handles[sequence.request_id])
        self._handles[sequence.request_id] = handle
        self._give_up(sequence.block_table[max(num_kept, num_cached) :].tolist())
        del sequence.block_table[num_kept:]
        sequence.num_computed_tokens = num_tokens

    def release(self, sequence: Sequence) -> None:
        """Give everything back; the full computed blocks stay behind as cache. Nothing happens if it has none."""
        if sequence.request_id not in self._handles:
            return
        self.publish(sequence)
        own = self._own_blocks(sequence)
        self.cache.release(self._handles.pop(sequence.request_id))
        self._give_up(own)
        del sequence.block_table[:]
        sequence.num_computed_tokens = 0

    def _own_blocks(self, sequence: Sequence) -> list[int]:
        return sequence.block_table[len(self._handles[sequence.request_id].block_ids) :].tolist()
