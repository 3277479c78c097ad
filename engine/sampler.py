"""Sampler: logits to token ids. One row's token depends on that row alone, whatever shares its batch.

A row is greedy (the highest logit, the lowest id among equals) or sampled:

1. suppressed ids get -inf; `z = (logit - max logit) / temperature`, in float64;
2. top-k, top-p and min-p, in this order, each say how small z may be; a token stays if it passes all three;
3. the token is the argmax of z + Gumbel noise, which is a draw from the softmax of the kept tokens. The noise is
   counted (core/counted_random.py): a function of seed, choice, position and token id.

The tie rule: a filter keeps or drops tokens of equal z together. So top-k keeps more than k tokens when others equal
the k-th, and top-p keeps all tokens that equal the last one needed to reach its mass. A filter is then one threshold,
which every device can apply without sorting.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import LocalProtocolError
from ..core.request import SamplingParams
from .philox import MAX_GUMBEL, gumbel_noise

# Below this temperature float32 logits that differ at all are too far apart for the noise to matter.
_GREEDY_TEMPERATURE = 1e-7
# Tokens so far below the best hold less than 49152 * exp(-12) = 30 % of its mass; few are nearer than that.
_NEAR = 12.0


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to choose the next token of one sequence."""

    params: SamplingParams
    choice: int
    position: int  # index of the sampled token in prompt + output
    suppress: tuple[int, ...] = ()  # ids that must not come (end of sequence while min_tokens is not reached)

    @property
    def greedy(self) -> bool:
        return self.params.greedy or self.params.temperature < _GREEDY_TEMPERATURE


class Sampler:
    """Stateless: everything a draw depends on is in its row."""

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[int]:
        """One token id per row of `logits` `[n, vocab_size]` float32, which is left as it is.

        Raises LocalProtocolError if the numbers of rows differ or a row suppresses its whole vocabulary.
        """
        if len(rows) != len(logits):
            raise LocalProtocolError(f"{len(logits)} rows of logits for {len(rows)} sampling rows")
        if any(row.suppress for row in rows):
            logits = logits.clone()
            for i, row in enumerate(rows):
                logits[i, list(row.suppress)] = -torch.inf
        best = logits.argmax(-1).tolist()
        return [
            best[i] if row.greedy else _draw(logits[i], row, float(logits[i, best[i]])) for i, row in enumerate(rows)
        ]


def kept_threshold(z: Tensor, params: SamplingParams) -> float:
    """The smallest z that top-k, top-p and min-p keep; `z` `[vocab_size]` is 0 at the best token.

    top_k counts tokens, top_p adds up probabilities among those that top_k kept until the sum reaches it, min_p is
    relative to the best token's probability.
    """
    threshold = -math.inf
    if 0 < params.top_k < len(z):
        threshold = float(z.topk(params.top_k, sorted=True).values[-1])
    if params.top_p < 1.0:
        threshold = max(threshold, _top_p_threshold(z, threshold, params.top_p))
    if params.min_p > 0.0:
        threshold = max(threshold, math.log(params.min_p))
    return threshold


def _top_p_threshold(z: Tensor, floor: float, top_p: float) -> float:
    kept = z if floor == -math.inf else z[z >= floor]
    wanted = top_p * float(kept.exp().sum())
    for candidates in (kept[kept >= -_NEAR], kept):  # sorting the whole vocabulary is rarely needed
        descending = candidates.sort(descending=True).values
        mass = descending.exp().cumsum(0)
        if float(mass[-1]) >= wanted:
            # The first place where the sum reaches what is wanted is the last token needed.
            return float(descending[int(torch.searchsorted(mass, wanted))])
    return float(descending[-1])  # rounding left the sum of all just below


def _draw(logits: Tensor, row: SamplingRow, best: float) -> int:
    if best == -math.inf:
        raise LocalProtocolError("every token of the vocabulary is suppressed")
    params = row.params
    z = (logits.double() - best).div_(params.temperature)
    threshold = kept_threshold(z, params)
    # The nearest tokens first: whoever cannot beat their best score even with the largest noise needs none.
    near = torch.nonzero(z >= max(threshold, -1.0)).squeeze(1)
    score = float((z[near] + _noise(row, near)).max())
    ids = torch.nonzero(z >= max(threshold, score - MAX_GUMBEL)).squeeze(1)
    return int(ids[(z[ids] + _noise(row, ids)).argmax()])


def _noise(row: SamplingRow, token_ids: Tensor) -> Tensor:
    return gumbel_noise(row.params.seed, row.choice, row.position, token_ids)
