"""DecoderModel: what all families become, a stack of decoder layers between an embedding and a head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..kernels import AttentionPlan, KernelSet, Linear, RopeAngles
from .layers import DecoderLayer, Embedding, ForwardContext, RMSNorm

LayerHook = Callable[[int], None]  # is told how many layers have been launched


@dataclass(frozen=True, slots=True)
class DecoderModel:
    kernels: KernelSet
    embedding: Embedding
    rotaries: tuple[RopeAngles, ...]  # one for each base
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    lm_head: Linear  # hidden_size |-> vocab_size
    logit_soft_cap: float = 0.0  # > 0: a logit x becomes `cap * tanh(x / cap)`

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        kv_layers: Sequence[Tensor],
        output_rows: Tensor | None,
        on_layer: LayerHook | None = None,
    ) -> Tensor:
        """Compute the batch's tokens and write their keys and values into the cache.

        `input_ids` and `positions` are `[N]`, `kv_layers` one cache view per layer. Returns the hidden states after the
        final norm of the tokens `output_rows` `[n]` (None: of all), as `[n, hidden_size]`. `on_layer(i)` is called when
        the first i layers have been launched.
        """
        context = ForwardContext(self.kernels, tuple(angles(positions) for angles in self.rotaries), plan)
        residual = self.embedding(input_ids)
        update: Tensor | None = None
        # Behind the last attention only the wanted tokens matter.
        last = None if output_rows is None or len(output_rows) == len(input_ids) else output_rows
        for index, (layer, kv_layer) in enumerate(zip(self.layers, kv_layers, strict=True), start=1):
            update, residual = layer(update, residual, kv_layer, context, last if index == len(self.layers) else None)
            if on_layer is not None:
                on_layer(index)
        assert update is not None
        return self.norm.after_adding(update, residual, self.kernels)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` after the final norm |-> `[n, vocab_size]` float32."""
        logits = self.lm_head(hidden)
        cap = self.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits
