"""ModelRunner: one forward pass, and the count of tokens computed where they are computed."""

import torch
from torch import Tensor

from ..kernels import plan_attention
from ..models.registry import Model
from .forward_batch import ForwardBatch
from .kv_cache_pool import KVCachePool


class ModelRunner:
    """Runs one model over one pool."""

    def __init__(self, model: Model, pool: KVCachePool):
        self.model = model
        self._pool = pool
        self.num_tokens_computed = 0
        self.num_steps = 0

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute the batch and write its keys and values into the pool.

        Returns the hidden states after the final norm, `[num wanted, hidden_size]`, in the order of the chunks that
        asked for theirs.
        """
        layers = self._pool.layers
        plan = plan_attention(layers[0], batch.slot_mapping, batch.cu_seqlens, batch.context_lens, batch.block_tables)
        hidden = self.model.forward(batch.input_ids, batch.positions, plan, layers, batch.output_rows)
        self.num_tokens_computed += batch.num_tokens
        self.num_steps += 1
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` as `forward` returned it |-> `[n, vocab_size]` float32."""
        return self.model.logits(hidden)
