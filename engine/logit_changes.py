"""What a row of sampling changes in its logits before a token is chosen, in lists that every device can apply.

In this order, each rounded to float32 once:

1. penalties: repetition for every token that has occurred, then frequency and presence for those of the output;
2. bias: a number for each of some tokens, -inf for those that must not come (`SamplingRow.suppress`);
3. what is not allowed (`SamplingRow.allowed`) gets -inf.

Ids outside of the vocabulary are passed over: a wrong request must not cost the others their step.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.request import SamplingParams
from ..kernels.cpu import add_bias, apply_penalties, keep_allowed
from .token_counts import TokenCounts

BiasArrays = tuple[NDArray[np.int64], NDArray[np.float64]]  # ids, each once, and what is added to their logits


class ChangingRow(Protocol):
    """The part of a SamplingRow that is read here."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def suppress(self) -> tuple[int, ...]: ...

    @property
    def counts(self) -> TokenCounts | None: ...

    @property
    def allowed(self) -> NDArray[np.int32] | None: ...


def changes_logits(row: ChangingRow) -> bool:
    return row.counts is not None or row.allowed is not None or bool(row.suppress or row.params.logit_bias)


@lru_cache(maxsize=512)  # the same for every step of a request
def bias_arrays(logit_bias: tuple[tuple[int, float], ...], suppress: tuple[int, ...], vocab_size: int) -> BiasArrays:
    """Bias and suppression of one row in one list, rising ids; of a token that comes twice the last one counts."""
    added = {**dict(logit_bias), **dict.fromkeys(suppress, -np.inf)}
    inside = sorted(token_id for token_id in added if 0 <= token_id < vocab_size)
    return np.array(inside, np.int64), np.array([added[token_id] for token_id in inside], np.float64)


def changed_on_host(logits: Tensor, rows: Sequence[ChangingRow]) -> Tensor:
    """`logits` `[n, vocab_size]` float32 with the changes of its rows; themselves when there are none, else a copy."""
    if not any(map(changes_logits, rows)):
        return logits
    logits = logits.clone()
    for row, of_row in zip(rows, logits, strict=True):
        if row.counts is not None:
            ids, counts = torch.from_numpy(row.counts.token_ids), torch.from_numpy(row.counts.counts)
            params = row.params
            rule = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            apply_penalties(of_row, ids, counts, *rule)
        ids, values = map(torch.from_numpy, bias_arrays(row.params.logit_bias, row.suppress, len(of_row)))
        if len(ids):
            add_bias(of_row, ids, values)
        if row.allowed is not None:
            keep_allowed(of_row, torch.from_numpy(row.allowed))
    return logits
