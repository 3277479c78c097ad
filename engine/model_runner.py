"""ModelRunner: one forward pass, and the count of tokens computed where they are computed."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..models.registry import Model
from .copy_stream import CopyStream
from .forward_batch import ForwardBatch
from .kv_cache_pool import KVCachePool
from .launched import Event, LayerProgress, record_event
from .staging import Stager

# How many times a step tells that layers are done: often enough to hide the hand-over of all but the last ones.
_MARKS_PER_STEP = 8


class DecodeGraphs(Protocol):
    """What runs a decode step in one launch where it can; see graph_runner.py."""

    def fits(self, batch: ForwardBatch) -> bool: ...

    def forward(self, batch: ForwardBatch) -> Tensor: ...


class ModelRunner:
    """Runs one model over one pool. On a GPU all calls but `to_host` return while the device still works."""

    def __init__(
        self, model: Model, pool: KVCachePool, stager: Stager, device: torch.device, graphs: DecodeGraphs | None = None
    ):
        self.model = model
        self._pool = pool
        self._stager = stager
        self._device = device
        self._graphs = graphs
        self._copies = CopyStream(device)
        self.num_tokens_computed = 0
        self.num_steps = 0
        self.progress = LayerProgress([(len(model.layers), record_event(device))])  # of the step launched last

    def start_counting(self) -> None:
        """What was computed until now was for nobody."""
        self.num_tokens_computed = self.num_steps = 0

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute the batch and write its keys and values into the pool.

        Returns the hidden states after the final norm, `[num wanted, hidden_size]`, in the order of the chunks that
        asked for theirs. They are for `logits`, before the next call, or for `to_host`.
        """
        marks: list[tuple[int, Event]] = []
        if self._graphs is not None and self._graphs.fits(batch):
            hidden = self._graphs.forward(batch)
        else:
            hidden = self._forward_layers(batch, marks)
        marks.append((len(self.model.layers), record_event(self._device)))
        self.progress = LayerProgress(marks)
        self.num_tokens_computed += batch.num_tokens
        self.num_steps += 1
        return hidden

    def _forward_layers(self, batch: ForwardBatch, marks: list[tuple[int, Event]]) -> Tensor:
        num_layers = len(self.model.layers)
        every = -(-num_layers // _MARKS_PER_STEP)

        def mark(layers: int) -> None:
            if layers % every == 0 and layers < num_layers:
                marks.append((layers, record_event(self._device)))

        staged = self._stager.stage(batch)
        return self.model.forward(
            staged.input_ids, staged.positions, staged.plan, self._pool.layers, staged.output_rows, mark
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` as `forward` returned it, or float32 on the host |-> `[n, vocab_size]` float32."""
        if hidden.device != self._device:
            # From pinned memory the copy is asynchronous; from other memory the host would wait for the step that runs.
            hidden = hidden.pin_memory().to(self._device, non_blocking=True)
        return self.model.logits(hidden.to(self.model.kernels.activation_dtype))

    def to_host(self, hidden: Tensor) -> NDArray[np.float32]:
        """What `forward` returned for a step that is done (`progress`), as float32 on the host.

        Waits for the copy, not for steps that have been launched since.
        """
        with self._copies():
            result: NDArray[np.float32] = hidden.to("cpu", torch.float32).numpy()
        return result
