"""ForwardBatch: the index arithmetic of one forward pass, on the host. Any mix of decodes and prompt chunks, packed.

chunks                  A: 1 token at position 9         B: 3 tokens from position 5
input_ids               a9                               b5 b6 b7
positions               9                                5  6  7
slot_mapping            slot of each token: block_table[position // block_size] * block_size + offset
cu_seqlens              0                                1                                  4
context_lens            10                               8
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.errors import LocalProtocolError

IntArray = NDArray[np.int64]
BlockIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to compute: a piece of a prompt, or the last token in a decode step.

    Decodes come first in a batch. Kernels may compute a decode in another way than a prompt's chunk of one token, so
    it is said which one it is: a prompt's result then does not depend on how it is cut.
    """

    token_ids: Sequence[int]
    start: int  # tokens of the sequence that are in the cache already
    block_table: Sequence[int]  # block ids of the sequence; must cover start + len(token_ids)
    wants_hidden: bool  # hand out the hidden state of the chunk's last token
    is_decode: bool = False
    feedback_slot: int = -1  # >= 0: the one token is not known on the host yet; the sampler leaves it in this slot
    wants_every_hidden: bool = False  # hand out those of all its tokens

    @property
    def num_hidden(self) -> int:
        """Of its last tokens the hidden states are handed out."""
        return len(self.token_ids) if self.wants_every_hidden else int(self.wants_hidden)

    @property
    def stop(self) -> int:
        """Tokens in the cache once this chunk is computed."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Chunks packed one behind the other. Sequence s owns the rows `cu_seqlens[s]` to `cu_seqlens[s + 1]`."""

    input_ids: IntArray  # [num_tokens]
    positions: IntArray  # [num_tokens]
    slot_mapping: IntArray  # [num_tokens]: block_id * block_size + offset
    output_rows: IntArray  # [num wanted], in the order of the chunks: rows whose hidden state is handed out
    feedback_slots: IntArray  # [num_decodes]: where a decode's token is read; -1: it is in input_ids
    cu_seqlens: list[int]
    context_lens: list[int]  # tokens each sequence attends to, its own new ones included
    block_tables: list[BlockIds]  # the blocks that hold them

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def num_decodes(self) -> int:
        """The first sequences: one decoded token each."""
        return len(self.feedback_slots)


def build_forward_batch(chunks: Sequence[Chunk], block_size: int) -> ForwardBatch:
    """Pack `chunks`, which belong to different sequences; raises LocalProtocolError if one cannot be computed."""
    if not chunks:
        raise LocalProtocolError("a forward pass needs at least one chunk")
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    input_ids, positions, slots = (np.empty(num_tokens, np.int64) for _ in range(3))
    output_rows: list[int] = []
    feedback_slots: list[int] = []
    cu_seqlens = [0]
    tables: list[BlockIds] = []
    for chunk in chunks:
        _check(chunk, block_size, decodes_may_follow=len(feedback_slots) == len(tables))
        start, table = chunk.start, block_ids(chunk.block_table, -(-chunk.stop // block_size))
        row, end = cu_seqlens[-1], cu_seqlens[-1] + len(chunk.token_ids)
        if end == row + 1:  # a decode: plain numbers are faster
            input_ids[row], positions[row] = chunk.token_ids[0], start
            slots[row] = int(table[start // block_size]) * block_size + start % block_size
        else:
            span = np.arange(start, chunk.stop)
            input_ids[row:end] = chunk.token_ids
            positions[row:end] = span
            slots[row:end] = table[span // block_size].astype(np.int64) * block_size + span % block_size
        tables.append(table)
        cu_seqlens.append(end)
        if chunk.is_decode:
            feedback_slots.append(chunk.feedback_slot)
        output_rows.extend(range(end - chunk.num_hidden, end))
    return ForwardBatch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slots,
        output_rows=np.array(output_rows, np.int64),
        feedback_slots=np.array(feedback_slots, np.int64),
        cu_seqlens=cu_seqlens,
        context_lens=[chunk.stop for chunk in chunks],
        block_tables=tables,
    )


def block_ids(block_table: Sequence[int], count: int) -> BlockIds:
    """The first `count` ids, copied: a numpy view would forbid the owner of an array to append to it."""
    first = block_table[:count]
    return (
        np.frombuffer(first, np.int32)
        if isinstance(first, array) and first.itemsize == 4
        else np.array(first, np.int32)
    )


def _check(chunk: Chunk, block_size: int, *, decodes_may_follow: bool) -> None:
    if not chunk.token_ids or chunk.start < 0:
        raise LocalProtocolError(f"a chunk needs tokens and a start of 0 or more, not {chunk.start}")
    if len(chunk.block_table) * block_size < chunk.stop:
        raise LocalProtocolError(
            f"a block table of {len(chunk.block_table)} blocks of {block_size} cannot hold {chunk.stop} tokens"
        )
    if chunk.is_decode and not (len(chunk.token_ids) == 1 and decodes_may_follow):
        raise LocalProtocolError("a decode is one token, and decodes come first in a batch")
    if chunk.feedback_slot >= 0 and not chunk.is_decode:
        raise LocalProtocolError("only a decode reads its token from a feedback slot")
