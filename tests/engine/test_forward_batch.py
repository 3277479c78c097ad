"""build_forward_batch against a literal and against a naive model that goes token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import LocalProtocolError
from baton.engine.forward_batch import Chunk, build_forward_batch


def test_the_example_of_the_docstring() -> None:
    a = Chunk([15, 16, 17], start=5, block_table=[4, 2], wants_hidden=False)
    b = Chunk([29], start=9, block_table=(7, 0, 1), wants_hidden=True)
    batch = build_forward_batch([a, b], block_size=4)
    assert batch.input_ids.tolist() == [15, 16, 17, 29]
    assert batch.positions.tolist() == [5, 6, 7, 9]
    assert batch.slot_mapping.tolist() == [2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 1 * 4 + 1]
    assert batch.cu_seqlens == [0, 3, 4]
    assert batch.context_lens == [8, 10]
    assert batch.block_tables == [[4, 2], (7, 0, 1)]
    assert batch.output_rows.tolist() == [3]
    assert batch.num_tokens == 4


@st.composite
def chunk_lists(draw: st.DrawFn) -> tuple[list[Chunk], int]:
    block_size = draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]))
    chunks = []
    for _ in range(draw(st.integers(1, 5))):
        tokens = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=40))
        start = draw(st.integers(0, 60))
        spare = draw(st.integers(0, 2))
        num_blocks = -(-(start + len(tokens)) // block_size) + spare
        table = draw(st.lists(st.integers(0, 500), min_size=num_blocks, max_size=num_blocks))
        chunks.append(Chunk(tokens, start, table, draw(st.booleans())))
    return chunks, block_size


@given(chunk_lists())
def test_equals_the_naive_model(drawn: tuple[list[Chunk], int]) -> None:
    chunks, block_size = drawn
    batch = build_forward_batch(chunks, block_size)
    row = 0
    wanted = []
    for s, chunk in enumerate(chunks):
        assert batch.cu_seqlens[s] == row
        slots = [block * block_size + offset for block in chunk.block_table for offset in range(block_size)]
        for offset, token in enumerate(chunk.token_ids):
            position = chunk.start + offset
            assert int(batch.input_ids[row]) == token
            assert int(batch.positions[row]) == position
            assert int(batch.slot_mapping[row]) == slots[position]
            row += 1
        assert batch.context_lens[s] == chunk.start + len(chunk.token_ids)
        if chunk.wants_hidden:
            wanted.append(row - 1)
    assert batch.num_tokens == batch.cu_seqlens[-1] == len(batch.input_ids) == row
    assert batch.output_rows.tolist() == wanted


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "at least one chunk"),
        ([Chunk([], 0, [1], True)], "needs tokens"),
        ([Chunk([1], -1, [1], True)], "start of 0 or more, not -1"),
        ([Chunk([1, 2], 3, [1], True)], "1 blocks of 4 cannot hold 5 tokens"),
    ],
)
def test_what_cannot_be_computed_is_our_bug(chunks: list[Chunk], message: str) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        build_forward_batch(chunks, 4)
