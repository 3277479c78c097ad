"""GraphRunner: decode steps as CUDA graphs, one per batch-size bucket.

Launching the kernels of a decode step one by one takes the host longer than the device needs to run them. A graph is
the whole step in one launch, but with fixed addresses: it reads static buffers, filled before each replay, and a batch
is padded to its bucket with rows that store nothing (slot -1) and see nothing (context 0).

    batch of 5 in bucket 8    input_ids     t0 t1 t2 t3 t4  0  0  0
                              slot_mapping  s0 s1 s2 s3 s4 -1 -1 -1
                              context_lens  c0 c1 c2 c3 c4  0  0  0
                              block_tables  only the columns that the batch uses are copied; what a row has behind its
                                            context is never read, so older steps may have left it
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels.gpu.decode_attention import DecodeWorkspace
from ..kernels.gpu.feedback import resolve_feedback
from ..kernels.gpu.kernels import DecodeSequences, GpuAttentionPlan
from ..models.registry import Model
from .device_staging import longest_width, table_width
from .forward_batch import ForwardBatch
from .kv_cache_pool import KVCachePool
from .upload import Field, Packing, Upload

Step = Callable[[], Tensor]


class GraphCapture(Protocol):
    """Makes a step repeatable: the function returned does again what `step` did, on the same buffers."""

    def __call__(self, step: Step) -> Step: ...


class CudaGraphCapture:
    """Graphs share one memory pool, so they must run one after the other: on the current stream."""

    def __init__(self, device: torch.device):
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads of this process do with the device meanwhile does not break the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def buckets_up_to(max_batch: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, then steps of 8, and `max_batch` itself."""
    sizes = [size for size in (1, 2, 4, *range(8, max_batch, 8)) if size < max_batch]
    return [*sizes, max_batch] if max_batch > 0 else []


class GraphRunner:
    """Decode steps of up to `max_batch` sequences with tables of up to `max_blocks` blocks."""

    def __init__(
        self,
        model: Model,
        pool: KVCachePool,
        feedback: Tensor,
        workspace: DecodeWorkspace,
        max_batch: int,
        max_blocks: int,
    ):
        self._model = model
        self._pool = pool
        self._feedback = feedback
        self._workspace = workspace
        self._max_blocks = table_width(max_blocks)
        self._buckets = buckets_up_to(max_batch)
        self._upload = Upload(feedback.device, Packing(_fields(max_batch, self._max_blocks)).num_bytes)
        self._tables = torch.zeros((max_batch, self._max_blocks), dtype=torch.int32, device=feedback.device)
        self._graphs: dict[int, Step] = {}

    @torch.inference_mode()
    def capture(self, capture: GraphCapture) -> None:
        """Make the graphs, largest first: the smaller ones then fit in the memory it took."""
        for bucket in reversed(self._buckets):
            self._send(_padding(bucket), bucket)
            step = self._step(bucket)
            step()  # kernels are compiled and loaded before the capture, which forbids both
            self._graphs[bucket] = capture(step)

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether there is a graph for this batch: decodes only, within the bounds of the static buffers."""
        count = batch.num_decodes
        return (
            bool(self._buckets)
            and count == len(batch.context_lens) == len(batch.output_rows)
            and count <= self._buckets[-1]
            and max(len(table) for table in batch.block_tables) <= self._max_blocks
            and self._workspace.fits(batch.context_lens)
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states `[num_decodes, hidden_size]`, valid until the next call."""
        bucket = self._buckets[bisect_left(self._buckets, batch.num_decodes)]
        self._send(batch, bucket)
        return self._graphs[bucket]()[: batch.num_decodes]

    def _send(self, batch: ForwardBatch, bucket: int) -> None:
        count, width = batch.num_decodes, longest_width(batch.block_tables)
        packing = Packing(_fields(bucket, width))
        on_device = packing.tensors(self._upload.send(packing, _values(batch, bucket)))
        self._tables[:count, :width].copy_(on_device["tables"][:count])

    def _step(self, bucket: int) -> Step:
        """The forward pass of one bucket. Its buffers lie where every packing of that bucket begins."""
        packing = Packing(_fields(bucket, self._max_blocks))
        static = packing.tensors(self._upload.buffer)
        decodes = DecodeSequences(self._tables[:bucket], static["context_lens"], self._workspace)
        plan = GpuAttentionPlan(static["slot_mapping"], decodes, None)

        def step() -> Tensor:
            resolve_feedback(static["input_ids"], static["feedback_slots"], self._feedback)
            return self._model.forward(static["input_ids"], static["positions"], plan, self._pool.layers, None)

        return step


def _fields(bucket: int, table_width: int) -> list[Field]:
    """The tables come last: their width changes from step to step, and nothing else may move."""
    return [
        *(Field(n, np.int64, (bucket,)) for n in ("input_ids", "positions", "slot_mapping", "feedback_slots")),
        Field("context_lens", np.int32, (bucket,)),
        Field("tables", np.int32, (bucket, table_width)),
    ]


def _values(batch: ForwardBatch, bucket: int) -> dict[str, object]:
    empty = np.empty(0, np.int32)
    padding = bucket - batch.num_decodes
    return {
        "input_ids": _padded(batch.input_ids, bucket, 0),
        "positions": _padded(batch.positions, bucket, 0),
        "slot_mapping": _padded(batch.slot_mapping, bucket, -1),
        "feedback_slots": _padded(batch.feedback_slots, bucket, -1),
        "context_lens": _padded(batch.context_lens, bucket, 0),
        "tables": [*batch.block_tables, *[empty] * padding],
    }


def _padded(values: Sequence[int] | np.ndarray, size: int, filler: int) -> np.ndarray:
    result = np.full(size, filler, np.int64)
    result[: len(values)] = values
    return result


def _padding(bucket: int) -> ForwardBatch:
    """A batch of padding rows alone: it computes nothing that is kept."""
    zeros, none = np.zeros(bucket, np.int64), np.full(bucket, -1, np.int64)
    return ForwardBatch(
        input_ids=zeros,
        positions=zeros,
        slot_mapping=none,
        output_rows=np.arange(bucket),
        feedback_slots=none,
        cu_seqlens=list(range(bucket + 1)),
        context_lens=[0] * bucket,
        block_tables=[np.zeros(1, np.int32)] * bucket,
    )
