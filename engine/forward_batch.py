"""ForwardBatch: the index arithmetic of one forward pass. Any mix of prompt chunks and one-token decodes, packed.

chunks                  A: 3 tokens from position 5      B: 1 token at position 9
input_ids               a5 a6 a7                         b9
positions               5  6  7                          9
slot_mapping            slot of each token: block_table[position // block_size] * block_size + offset
cu_seqlens              0                                3                                  4
context_lens            8                                10
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to compute: a piece of a prompt, or the last token in a decode step."""

    token_ids: list[int]
    start: int  # tokens of the sequence that are in the cache already
    block_table: Sequence[int]  # block ids of the sequence; must cover start + len(token_ids)
    wants_hidden: bool  # hand out the hidden state of the chunk's last token

    @property
    def stop(self) -> int:
        """Tokens in the cache once this chunk is computed."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Chunks packed one behind the other. Sequence s owns the rows `cu_seqlens[s]` to `cu_seqlens[s + 1]`."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset
    output_rows: Tensor  # [num wanted] int64: rows whose hidden state is handed out
    cu_seqlens: list[int]
    context_lens: list[int]  # tokens each sequence attends to, its own new ones included
    block_tables: list[Sequence[int]]

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]


def build_forward_batch(chunks: list[Chunk], block_size: int) -> ForwardBatch:
    """Pack `chunks`, which belong to different sequences; raises LocalProtocolError if one cannot be computed."""
    if not chunks:
        raise LocalProtocolError("a forward pass needs at least one chunk")
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    output_rows: list[int] = []
    cu_seqlens = [0]
    for chunk in chunks:
        _check(chunk, block_size)
        table = chunk.block_table
        span = range(chunk.start, chunk.stop)
        input_ids.extend(chunk.token_ids)
        positions.extend(span)
        slots.extend(table[t // block_size] * block_size + t % block_size for t in span)
        cu_seqlens.append(len(input_ids))
        if chunk.wants_hidden:
            output_rows.append(len(input_ids) - 1)
    return ForwardBatch(
        input_ids=torch.tensor(input_ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        output_rows=torch.tensor(output_rows, dtype=torch.int64),
        cu_seqlens=cu_seqlens,
        context_lens=[chunk.stop for chunk in chunks],
        block_tables=[chunk.block_table for chunk in chunks],
    )


def _check(chunk: Chunk, block_size: int) -> None:
    if not chunk.token_ids or chunk.start < 0:
        raise LocalProtocolError(f"a chunk needs tokens and a start of 0 or more, not {chunk.start}")
    if len(chunk.block_table) * block_size < chunk.stop:
        raise LocalProtocolError(
            f"a block table of {len(chunk.block_table)} blocks of {block_size} cannot hold {chunk.stop} tokens"
        )
