"""DeviceStager: a ForwardBatch in tensors on the device, brought there in one copy."""

import numpy as np
from torch import Tensor

from ..kernels.gpu.decode_attention import DecodeWorkspace
from ..kernels.gpu.feedback import resolve_feedback
from ..kernels.gpu.kernels import ChunkSequences, DecodeSequences, GpuAttentionPlan
from .forward_batch import BlockIds, ForwardBatch
from .staging import StagedBatch
from .upload import Field, Packing, Upload

_INITIAL_BYTES = 1 << 20


class DeviceStager:
    """Stager of the Triton kernels. `workspace` serves all batches whose decodes fit it; larger ones get their own."""

    def __init__(self, feedback: Tensor, workspace: DecodeWorkspace):
        self._feedback = feedback
        self._workspace = workspace
        self._upload = Upload(feedback.device, _INITIAL_BYTES)

    def stage(self, batch: ForwardBatch) -> StagedBatch:
        packing = Packing(_fields(batch))
        on_device = packing.tensors(self._upload.send(packing, _values(batch)))
        input_ids = on_device["input_ids"]
        if (batch.feedback_slots >= 0).any():
            resolve_feedback(input_ids, on_device["feedback_slots"], self._feedback)
        plan = GpuAttentionPlan(on_device["slot_mapping"], self._decodes(batch, on_device), _chunks(batch, on_device))
        return StagedBatch(input_ids, on_device["positions"], on_device["output_rows"], plan)

    def _decodes(self, batch: ForwardBatch, on_device: dict[str, Tensor]) -> DecodeSequences | None:
        count = batch.num_decodes
        if count == 0:
            return None
        workspace, lengths = self._workspace, batch.context_lens[:count]
        if not workspace.fits(lengths):
            # Contexts that share blocks can have more tokens in all than the pool. A piece's result does not depend on
            # where it is kept, so neither does the batch's.
            _, num_heads, head_dim = workspace.partial_out.shape
            workspace = DecodeWorkspace.allocate(count, sum(lengths), num_heads, head_dim, self._feedback.device)
        return DecodeSequences(on_device["decode_tables"], on_device["decode_context_lens"], workspace)


def _chunks(batch: ForwardBatch, on_device: dict[str, Tensor]) -> ChunkSequences | None:
    first = batch.num_decodes
    if first == len(batch.context_lens):
        return None
    max_len = int(np.diff(batch.cu_seqlens[first:]).max())
    return ChunkSequences(
        on_device["chunk_tables"], on_device["chunk_context_lens"], on_device["chunk_cu_seqlens"], max_len
    )


def _fields(batch: ForwardBatch) -> list[Field]:
    decodes, chunks = batch.num_decodes, len(batch.context_lens) - batch.num_decodes
    return [
        *(Field(name, np.int64, (batch.num_tokens,)) for name in ("input_ids", "positions", "slot_mapping")),
        Field("output_rows", np.int64, batch.output_rows.shape),
        Field("feedback_slots", np.int64, (decodes,)),
        Field("decode_context_lens", np.int32, (decodes,)),
        Field("decode_tables", np.int32, (decodes, longest_width(batch.block_tables[:decodes]))),
        Field("chunk_context_lens", np.int32, (chunks,)),
        Field("chunk_cu_seqlens", np.int32, (chunks + 1,)),
        Field("chunk_tables", np.int32, (chunks, longest_width(batch.block_tables[decodes:]))),
    ]


def _values(batch: ForwardBatch) -> dict[str, object]:
    first = batch.num_decodes
    return {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "slot_mapping": batch.slot_mapping,
        "output_rows": batch.output_rows,
        "feedback_slots": batch.feedback_slots,
        "decode_context_lens": batch.context_lens[:first],
        "decode_tables": batch.block_tables[:first],
        "chunk_context_lens": batch.context_lens[first:],
        "chunk_cu_seqlens": np.array(batch.cu_seqlens[first:]) - first,  # a decode is one row
        "chunk_tables": batch.block_tables[first:],
    }


def table_width(num_blocks: int) -> int:
    """Columns for tables of `num_blocks` blocks, in steps of 4: rows start at multiples of 16 bytes."""
    return max(4, -(-num_blocks // 4) * 4)


def longest_width(tables: list[BlockIds]) -> int:
    return table_width(max((len(table) for table in tables), default=0))
