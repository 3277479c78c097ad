"""From a ForwardBatch to what the model reads: the tensors of one step and its attention plan."""

from collections.abc import Collection
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels import AttentionPlan
from ..kernels.cpu import plan_attention, resolve_feedback
from .forward_batch import ForwardBatch
from .kv_cache_pool import KVCachePool


class StagedBatch(NamedTuple):
    """Inputs of `DecoderModel.forward`, on its device."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    output_rows: Tensor | None  # [num wanted] int64; None: all rows
    plan: AttentionPlan


class Stager(Protocol):
    def stage(self, batch: ForwardBatch) -> StagedBatch:
        """Bring a batch to the device. The tensors are valid for the next forward pass only."""


class HostStager:
    """Stager of the CPU path: arrays become tensors where they lie."""

    def __init__(self, pool: KVCachePool, feedback: Tensor, windows: Collection[int] = (0,)):
        """`windows`: those that occur among the model's layers."""
        self._windows = windows
        self._pool = pool
        self._feedback = feedback

    def stage(self, batch: ForwardBatch) -> StagedBatch:
        input_ids = torch.from_numpy(batch.input_ids)
        if (batch.feedback_slots >= 0).any():
            input_ids = input_ids.clone()
            resolve_feedback(input_ids, torch.from_numpy(batch.feedback_slots), self._feedback)
        plan = plan_attention(
            self._pool.layers[0],
            torch.from_numpy(batch.slot_mapping),
            batch.cu_seqlens,
            batch.context_lens,
            [torch.from_numpy(table.astype(np.int64)) for table in batch.block_tables],
            self._windows,
        )
        output_rows = torch.from_numpy(batch.output_rows)
        return StagedBatch(input_ids, torch.from_numpy(batch.positions), output_rows, plan)
