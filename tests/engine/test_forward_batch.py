"""build_forward_batch against a literal and against a naive model that goes token by token."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import LocalProtocolError
from baton.engine.forward_batch import Chunk, build_forward_batch


def test_the_example_of_the_docstring() -> None:
    a = Chunk([29], start=9, block_table=(7, 0, 1), wants_hidden=True, is_decode=True, feedback_slot=3)
    b = Chunk([15, 16, 17], start=5, block_table=[4, 2, 9], wants_hidden=False)
    batch = build_forward_batch([a, b], block_size=4)
    assert batch.input_ids.tolist() == [29, 15, 16, 17]
    assert batch.positions.tolist() == [9, 5, 6, 7]
    assert batch.slot_mapping.tolist() == [1 * 4 + 1, 2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3]
    assert batch.cu_seqlens == [0, 1, 4]
    assert batch.context_lens == [10, 8]
    assert [table.tolist() for table in batch.block_tables] == [[7, 0, 1], [4, 2]]
    assert batch.output_rows.tolist() == [0]
    assert batch.feedback_slots.tolist() == [3]
    assert batch.num_decodes == 1
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
        kind = draw(st.sampled_from([list, tuple, lambda ids: array("i", ids)]))
        is_decode = len(tokens) == 1 and draw(st.booleans())
        slot = draw(st.integers(-1, 5)) if is_decode else -1
        chunks.append(Chunk(tokens, start, kind(table), draw(st.booleans()), is_decode, slot, draw(st.booleans())))
    return sorted(chunks, key=lambda chunk: not chunk.is_decode), block_size


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
        assert batch.block_tables[s].tolist() == list(chunk.block_table[: -(-batch.context_lens[s] // block_size)])
        if chunk.wants_every_hidden:
            wanted += range(row - len(chunk.token_ids), row)
        elif chunk.wants_hidden:
            wanted.append(row - 1)
    assert batch.num_tokens == batch.cu_seqlens[-1] == len(batch.input_ids) == row
    assert batch.output_rows.tolist() == wanted
    assert batch.feedback_slots.tolist() == [chunk.feedback_slot for chunk in chunks if chunk.is_decode]


def test_a_batch_keeps_nothing_of_a_table_that_grows() -> None:
    """A numpy view of an array would forbid its owner to append a block."""
    table = array("i", [3, 5])
    batch = build_forward_batch([Chunk([1], 4, table, True, is_decode=True)], 4)
    table.append(7)
    assert [ids.tolist() for ids in batch.block_tables] == [[3, 5]]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "at least one chunk"),
        ([Chunk([], 0, [1], True)], "needs tokens"),
        ([Chunk([1], -1, [1], True)], "start of 0 or more, not -1"),
        ([Chunk([1, 2], 3, [1], True)], "1 blocks of 4 cannot hold 5 tokens"),
        ([Chunk([1, 2], 0, [1], True, is_decode=True)], "a decode is one token"),
        ([Chunk([1], 0, [1], True), Chunk([1], 0, [2], True, is_decode=True)], "decodes come first"),
        ([Chunk([1], 0, [1], True, feedback_slot=0)], "only a decode reads its token from a feedback slot"),
    ],
)
def test_what_cannot_be_computed_is_our_bug(chunks: list[Chunk], message: str) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        build_forward_batch(chunks, 4)
