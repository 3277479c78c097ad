"""SequenceBlocks: literals for each change of ownership, then random lives of many sequences against the ledger."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.sequence import Sequence
from baton.radix_cache.block_pool import BlockState
from baton.radix_cache.cache import RadixCache
from baton.worker.sequence_blocks import SequenceBlocks

BLOCK_SIZE = 4


def make(num_blocks: int = 8) -> SequenceBlocks:
    return SequenceBlocks(RadixCache(num_blocks, BLOCK_SIZE), BLOCK_SIZE)


def sequence(name: str, token_ids: list[int]) -> Sequence:
    return Sequence(name, "n", token_ids, len(token_ids))


def computed(blocks: SequenceBlocks, name: str, token_ids: list[int]) -> Sequence:
    s = sequence(name, token_ids)
    assert blocks.acquire(s, s.num_tokens, BlockState.PRIVATE)
    compute(s)
    return s


def compute(s: Sequence) -> None:
    """A forward pass over all that is missing."""
    num_tokens = s.num_uncomputed_tokens
    s.launched(num_tokens)
    s.collected(num_tokens)


def test_a_released_sequence_leaves_its_full_blocks_as_cache() -> None:
    blocks = make()
    blocks.release(computed(blocks, "a", list(range(10))))
    counts = blocks.cache.pool.counts()
    assert (counts.cached, counts.free, counts.private) == (2, 6, 0)
    assert len(blocks.cache.handles) == 0


def test_a_second_sequence_shares_the_full_blocks_of_the_common_prefix() -> None:
    blocks = make()
    blocks.release(computed(blocks, "a", list(range(10))))
    s = sequence("b", [*range(8), 99, 98])
    assert blocks.acquire(s, 10, BlockState.PRIVATE)
    assert s.num_computed_tokens == 8
    assert len(s.block_table) == 3


def test_what_no_cache_has_is_known_before_there_are_blocks() -> None:
    blocks = make()
    blocks.release(computed(blocks, "a", list(range(10))))
    assert blocks.num_uncached_tokens(sequence("b", [*range(8), 99, 98])) == 2
    assert blocks.num_uncached_tokens(sequence("c", list(range(8)))) == 4, "one must be left to compute"
    assert blocks.num_uncached_tokens(sequence("d", [9, 9, 9])) == 3


def test_as_many_blocks_as_are_lacking_are_enough_and_one_fewer_is_not() -> None:
    """The cached prefix is not counted twice: as found and as what could be evicted."""
    blocks = make(num_blocks=8)
    blocks.release(computed(blocks, "a", list(range(8))))
    own = [blocks.cache.pool.allocate(1, BlockState.PRIVATE) for _ in range(6)]  # 2 are left, both cached
    s = sequence("b", [*range(8), *[99] * 8])
    assert blocks.lacking_blocks(s, 17, headroom=1) == 4  # 5 in all, 2 of them found
    assert len(blocks.cache.handles) == 0
    for block_ids in own[:4]:
        assert not blocks.acquire(s, 17, BlockState.PRIVATE, 1)
        blocks.cache.pool.free(block_ids)
    assert blocks.lacking_blocks(s, 17, headroom=1) == 0
    assert blocks.acquire(s, 17, BlockState.PRIVATE, 1)


def test_a_fully_cached_prompt_leaves_a_token_to_compute() -> None:
    blocks = make()
    blocks.release(computed(blocks, "a", list(range(8))))
    s = sequence("b", list(range(8)))
    assert blocks.acquire(s, 9, BlockState.PRIVATE)
    assert s.num_computed_tokens == 4


def test_two_that_computed_the_same_end_with_the_same_blocks() -> None:
    blocks = make()
    first, second = computed(blocks, "a", list(range(9))), computed(blocks, "b", list(range(9)))
    table = second.block_table
    blocks.publish(first)
    blocks.publish(second)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table is table, "a hand-over in progress reads the same list"
    assert blocks.cache.pool.counts().private == 2, "one partial block each; the duplicates are free"


def test_without_enough_blocks_nothing_is_held() -> None:
    blocks = make(num_blocks=2)
    s = sequence("a", list(range(9)))
    assert not blocks.acquire(s, 9, BlockState.PRIVATE)
    assert blocks.cache.ledger().idle


def test_headroom_is_left_for_those_who_run() -> None:
    blocks = make(num_blocks=3)
    assert not blocks.acquire(sequence("a", list(range(8))), 8, BlockState.PRIVATE, headroom=2)
    assert blocks.acquire(sequence("b", list(range(8))), 8, BlockState.PRIVATE, headroom=1)


def test_growing_takes_a_block_at_the_border_only() -> None:
    blocks = make(num_blocks=2)
    s = computed(blocks, "a", [1, 2, 3])
    assert blocks.missing_blocks(s, 4) == 0
    assert blocks.grow(s, 4)
    assert blocks.missing_blocks(s, 5) == 1
    assert blocks.grow(s, 5)
    assert not blocks.grow(s, 9)


def test_reserved_blocks_become_private_when_the_hand_over_is_settled() -> None:
    blocks = make()
    s = sequence("a", list(range(6)))
    assert blocks.acquire(s, 7, BlockState.RESERVED)
    assert blocks.cache.pool.counts().reserved == 2
    blocks.settle(s)
    assert (blocks.cache.pool.counts().reserved, blocks.cache.pool.counts().private) == (0, 2)


def test_an_aborted_hand_over_gives_its_reserved_blocks_back() -> None:
    blocks = make()
    s = sequence("a", list(range(6)))
    assert blocks.acquire(s, 7, BlockState.RESERVED)
    blocks.release(s)
    assert blocks.cache.ledger().idle
    assert blocks.cache.pool.counts().free == 8


def test_blocks_given_up_under_a_step_are_free_when_it_and_all_older_ones_are_collected() -> None:
    blocks = make()
    s = computed(blocks, "a", list(range(6)))
    pool = blocks.cache.pool
    older, newer = blocks.step_launched(), blocks.step_launched()
    blocks.release(s)
    later = blocks.step_launched()
    assert (pool.counts().private, pool.counts().cached) == (1, 1)
    blocks.step_collected(newer)
    assert pool.counts().private == 1
    blocks.step_collected(older)
    assert pool.counts().private == 0
    blocks.step_collected(later)
    assert blocks.cache.ledger().idle


def test_a_fork_shares_full_blocks_and_has_a_partial_one_of_its_own() -> None:
    blocks = make()
    source = computed(blocks, "a", list(range(10)))
    blocks.publish(source)
    forks = [sequence(name, list(range(10))) for name in "bc"]
    for fork in forks:
        assert blocks.fork(source, fork, 11)
        assert fork.num_computed_tokens == 10
        assert fork.block_table[:2] == source.block_table[:2]
    assert len({source.block_table[2], *(fork.block_table[2] for fork in forks)}) == 3
    assert blocks.cache.num_available == 8 - (2 + 3)
    blocks.release(source)
    assert blocks.cache.num_available == 8 - (2 + 2)
    for fork in forks:
        blocks.release(fork)
    assert blocks.cache.ledger().idle


def test_a_fork_at_the_border_of_a_block_shares_all_of_the_prompt() -> None:
    blocks = make()
    source = computed(blocks, "a", list(range(8)))
    blocks.publish(source)
    fork = sequence("b", list(range(8)))
    assert blocks.fork(source, fork, 9)
    assert (fork.block_table[:2], len(fork.block_table)) == (source.block_table[:2], 3)


def test_a_fork_without_enough_blocks_holds_nothing() -> None:
    blocks = make(num_blocks=4)
    source = computed(blocks, "a", list(range(10)))
    blocks.publish(source)
    fork = sequence("b", list(range(10)))
    assert not blocks.fork(source, fork, 11, headroom=1)
    assert not fork.block_table
    assert len(blocks.cache.handles) == 1
    assert blocks.fork(source, fork, 11)


@pytest.mark.parametrize(("num_output", "num_cached"), [(1, 2), (2, 3), (6, 4)])
def test_what_is_kept_of_a_sequence_are_the_blocks_of_its_first_tokens(num_output: int, num_cached: int) -> None:
    """Ten tokens in three blocks; the third one is partial, or was filled up and cached since."""
    blocks = make()
    source = computed(blocks, "a", list(range(10)))
    for token in range(num_output):
        assert blocks.grow(source, source.num_tokens + 1)
        source.expect()
        source.append(token)
        compute(source)
    table = source.block_table.tolist()
    blocks.keep_only(source, 10)
    assert (source.block_table.tolist(), source.num_computed_tokens) == (table[:3], 10)
    assert blocks.cache.num_available == 8 - 3
    assert blocks.cache.pool.counts().cached == num_cached, "what was computed stays behind"
    fork = sequence("b", list(range(10)))
    assert blocks.fork(source, fork, 11)
    assert fork.block_table[2] != table[2]
    blocks.release(source)
    blocks.release(fork)
    assert blocks.cache.ledger().idle


class Lives(RuleBasedStateMachine):
    """Sequences over a tiny alphabet (so that prefixes collide) come, grow, fork, publish and go in any order, while
    steps that use their blocks are launched and collected."""

    @initialize(num_blocks=st.integers(4, 12))
    def start(self, num_blocks: int) -> None:
        self.blocks = make(num_blocks)
        self.live: list[Sequence] = []
        self.kept: list[Sequence] = []  # they do not grow
        self.count = 0
        self.in_flight: dict[int, set[int]] = {}  # step |-> blocks it may write

    @rule()
    def launch(self) -> None:
        pool = self.blocks.cache.pool
        own = {b for s in self.live + self.kept for b in s.block_table if pool.state(b) is BlockState.PRIVATE}
        self.in_flight[self.blocks.step_launched()] = own

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def collect(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.in_flight)))
        del self.in_flight[number]
        self.blocks.step_collected(number)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def come(self, tokens: list[int]) -> None:
        self.count += 1
        s = sequence(f"s{self.count}", tokens)
        if self.blocks.acquire(s, s.num_tokens, BlockState.PRIVATE):
            compute(s)
            self.live.append(s)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def step(self, data: st.DataObject, token: int) -> None:
        s = data.draw(st.sampled_from(self.live))
        if self.blocks.grow(s, s.num_tokens + 1):
            s.expect()
            s.append(token)
            compute(s)

    @precondition(lambda self: self.live or self.kept)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.live + self.kept))
        num_tokens = data.draw(st.integers(1, source.num_computed_tokens))
        self.blocks.publish(source)
        self.count += 1
        s = sequence(f"s{self.count}", source.token_ids[:num_tokens])
        if self.blocks.fork(source, s, num_tokens + 1):
            self.live.append(s)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def keep_only(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from(self.live))
        num_tokens = data.draw(st.integers(1, s.num_computed_tokens))
        self.blocks.keep_only(s, num_tokens)
        self.live.remove(s)
        self.kept.append(s)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.blocks.publish(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.live or self.kept)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from(self.live + self.kept))
        (self.live if s in self.live else self.kept).remove(s)
        self.blocks.release(s)

    @invariant()
    def tables_are_large_enough_and_own_blocks_are_nobody_elses(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.cache.check_integrity()
        pool = self.blocks.cache.pool
        private = [b for s in self.live + self.kept for b in s.block_table if pool.state(b) is BlockState.PRIVATE]
        assert len(private) == len(set(private)) <= pool.counts().private
        assert self.in_flight or len(private) == pool.counts().private
        for block in set().union(*self.in_flight.values()):
            assert pool.state(block) in (BlockState.PRIVATE, BlockState.CACHED), "a step may write into a free block"
        for s in self.live:
            assert len(s.block_table) * BLOCK_SIZE >= s.num_computed_tokens

    def teardown(self) -> None:
        if hasattr(self, "blocks"):
            for s in self.live + self.kept:
                self.blocks.release(s)
            for number in self.in_flight:
                self.blocks.step_collected(number)
            assert self.blocks.cache.ledger().idle


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLives = Lives.TestCase
