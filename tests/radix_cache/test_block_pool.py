"""BlockPool: every block in exactly one state, illegal moves raise and change nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import LocalProtocolError, OutOfBlocks
from baton.radix_cache.block_pool import BlockCounts, BlockPool, BlockState

FREE, RESERVED, PRIVATE, CACHED, QUARANTINED = BlockState


def pool_with(state: BlockState) -> tuple[BlockPool, list[int]]:
    """A pool of 4 whose blocks 0 and 1 are in `state`."""
    pool = BlockPool(4)
    if state is FREE:
        return pool, [0, 1]
    block_ids = pool.allocate(2, PRIVATE if state is CACHED else RESERVED)
    if pool.state(block_ids[0]) is not state:
        pool.move(block_ids, state)
    return pool, block_ids


def test_a_new_pool_gives_ascending_blocks_and_the_last_freed_first() -> None:
    pool = BlockPool(5)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([0, 1])
    assert pool.allocate(3) == [0, 1, 3]
    assert pool.allocate(0) == []
    assert pool.num_free == 1
    pool.check_integrity()


def test_too_many_blocks_take_none() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.counts() == BlockCounts(free=2, reserved=0, private=1, cached=0, quarantined=0)


@pytest.mark.parametrize("state", [FREE, CACHED, QUARANTINED])
def test_blocks_are_allocated_as_reserved_or_private_only(state: BlockState) -> None:
    with pytest.raises(LocalProtocolError, match=state.value):
        BlockPool(3).allocate(1, state)


def test_a_negative_number_of_blocks_raises() -> None:
    with pytest.raises(LocalProtocolError):
        BlockPool(3).allocate(-1)


def test_a_pool_of_no_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)


LEGAL = {
    (RESERVED, PRIVATE),
    (PRIVATE, CACHED),
    (RESERVED, QUARANTINED),
    (PRIVATE, QUARANTINED),
}


@pytest.mark.parametrize("source", list(BlockState))
@pytest.mark.parametrize("target", list(BlockState))
def test_the_table_of_moves(source: BlockState, target: BlockState) -> None:
    pool, block_ids = pool_with(source)
    if (source, target) in LEGAL:
        pool.move(block_ids, target)
        assert [pool.state(b) for b in block_ids] == [target, target]
    else:
        with pytest.raises(LocalProtocolError, match=target.value):
            pool.move(block_ids, target)
        assert [pool.state(b) for b in block_ids] == [source, source]
    assert pool.counts().total == 4
    pool.check_integrity()


@pytest.mark.parametrize("state", [RESERVED, PRIVATE, QUARANTINED])
def test_freeing_twice_raises(state: BlockState) -> None:
    pool, block_ids = pool_with(state)
    pool.free(block_ids)
    assert pool.num_free == 4
    with pytest.raises(LocalProtocolError, match=r"0 \(free\), 1 \(free\)"):
        pool.free(block_ids)
    assert pool.num_free == 4
    pool.check_integrity()


def test_free_takes_blocks_of_several_states() -> None:
    pool = BlockPool(4)
    reserved, private = pool.allocate(2, RESERVED), pool.allocate(1)
    pool.free([*private, *reserved])
    assert pool.counts().free == 4
    pool.check_integrity()


def test_only_the_tree_frees_cached_blocks() -> None:
    pool, block_ids = pool_with(CACHED)
    with pytest.raises(LocalProtocolError, match="cached"):
        pool.free(block_ids)
    pool.free_evicted(block_ids)
    assert pool.num_free == 4
    with pytest.raises(LocalProtocolError, match="not cached"):
        pool.free_evicted(block_ids)


@pytest.mark.parametrize("wrong", [[0, 0], [0, 3], [0, 99], [0, -1]], ids=["twice", "free", "beyond", "negative"])
def test_one_wrong_block_and_none_moves(wrong: list[int]) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(LocalProtocolError):
        pool.move(wrong, CACHED)
    with pytest.raises(LocalProtocolError):
        pool.free(wrong)
    assert pool.counts() == BlockCounts(free=2, reserved=0, private=2, cached=0, quarantined=0)
    pool.check_integrity()


@pytest.mark.parametrize("block_id", [-1, 4])
def test_the_state_of_no_block(block_id: int) -> None:
    with pytest.raises(LocalProtocolError, match="does not exist"):
        BlockPool(4).state(block_id)


def test_integrity_notices_a_lost_and_a_shared_block() -> None:
    pool = BlockPool(4)
    pool._free.remove(2)
    with pytest.raises(LocalProtocolError, match="lost"):
        pool.check_integrity()
    pool._free.append(3)
    with pytest.raises(LocalProtocolError, match="two states"):
        pool.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["allocate", *BlockState]), st.integers(0, 7), st.integers(0, 3))))
def test_any_calls_agree_with_a_table_of_states(calls: list[tuple[str | BlockState, int, int]]) -> None:
    pool, states = BlockPool(8), [FREE] * 8
    for call, first, n in calls:
        block_ids = [(first + i) % 8 for i in range(n)]
        found = {states[b] for b in block_ids}
        try:
            if call == "allocate":
                target = RESERVED if first % 2 else PRIVATE
                block_ids = pool.allocate(n, target)
                assert all(states[b] is FREE for b in block_ids)
            elif call is FREE:
                target = FREE
                pool.free(block_ids)
                assert found <= {RESERVED, PRIVATE, QUARANTINED}
            else:
                assert isinstance(call, BlockState)
                target = call
                pool.move(block_ids, target)
                assert all((source, target) in LEGAL for source in found)
        except OutOfBlocks:
            assert n > states.count(FREE)
        except LocalProtocolError:
            assert call is not FREE or not found <= {RESERVED, PRIVATE, QUARANTINED}
            assert not found or not all((source, call) in LEGAL for source in found)
        else:
            for b in block_ids:
                states[b] = target
        assert [pool.state(b) for b in range(8)] == states
        pool.check_integrity()
