"""What happens to one row of logits before a token is chosen, and what the row says about tokens.

A change is computed in float64 and rounded once, so every device gets the same float32. Nothing here can make a NaN of
finite logits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Log-probabilities are told as numbers that any JSON reader takes; a token that cannot come has this one.
LEAST_LOGPROB = -9999.0

_GROUP = 64
# Of each byte of a bit mask, what to add to the logits of its eight tokens.
_ZERO_OR_MINUS_INF = torch.where(
    torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1 == 1, 0.0, -torch.inf
)  # [256, 8]


def apply_penalties(
    logits: Tensor, token_ids: Tensor, counts: Tensor, repetition: float, presence: float, frequency: float
) -> None:
    """Penalise in place the tokens that have occurred, of one row of `logits` `[vocab_size]`.

    `token_ids` `[n]` are these tokens, each once; `counts` `[n]` says how often each one is in the output (0: it is in
    the prompt alone). Repetition (Keskar et al., 2019: CTRL) divides a positive logit and multiplies another one; a
    token of the output then loses `frequency` times its count, and `presence` once.
    """
    logit, counts = logits[token_ids].double(), counts.double()
    logit = torch.where(logit > 0, logit / repetition, logit * repetition)
    logit -= frequency * counts + presence * counts.clamp(max=1)
    logits[token_ids] = logit.float()


def add_bias(logits: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Add `values` `[n]` float64 to the logits of `token_ids` `[n]`, different ones, in place; -inf suppresses."""
    logits[token_ids] = (logits[token_ids].double() + values).float()


def keep_allowed(logits: Tensor, allowed: Tensor) -> None:
    """-inf in place for every token whose bit in `allowed` `[ceil(vocab_size / 32)]` int32 is 0.

    Bit `i % 32` of word `i // 32`, counted from the lowest, is token i's. A row that holds +inf gets a NaN: neither has
    a token.
    """
    added = _ZERO_OR_MINUS_INF[allowed.view(torch.uint8).int()]  # adding is three times as fast as a masked fill
    logits += added.flatten()[: len(logits)]


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of rows of `logits` `[n, vocab_size]` at `token_ids` `[n]`, and the `num_top` highest of each row.

    Returns `[n]` float32, `[n, num_top]` float32 in falling order, and their ids, lowest first among equals. All lie
    between LEAST_LOGPROB and 0, also where the model's logits are no numbers. `num_top` is at most the vocabulary.
    What a row gives does not depend on the others.
    """
    chosen = torch.empty(len(logits))
    top = torch.empty((len(logits), num_top))
    top_ids = torch.empty((len(logits), num_top), dtype=torch.int64)
    for i, row in enumerate(logits):
        total = row.logsumexp(0)
        chosen[i] = row[token_ids[i]] - total
        if num_top:
            ids = _highest(row, num_top)
            top[i], top_ids[i] = row[ids] - total, ids
    return _told(chosen), _told(top), top_ids


def _told(logprobs: Tensor) -> Tensor:
    return torch.where(logprobs >= LEAST_LOGPROB, logprobs, LEAST_LOGPROB).clamp_(max=0.0)


def _highest(row: Tensor, count: int) -> Tensor:
    """Ids of the `count` highest logits of `[vocab_size]`, the lowest ids first among equals.

    Only groups of neighbours whose best logit is among the `count` best of all groups can hold one.
    """
    padding = -len(row) % _GROUP
    groups = (F.pad(row, (0, padding), value=-torch.inf) if padding else row).view(-1, _GROUP)
    best = groups.amax(1).nan_to_num_(torch.inf, torch.inf, -torch.inf)  # what is no number compares with nothing
    near = (best >= best.topk(min(count, len(best))).values[-1]).nonzero()  # [m, 1], rising
    order = groups[near.flatten()].flatten().sort(descending=True, stable=True).indices[:count]
    return (near * _GROUP + torch.arange(_GROUP)).flatten()[order]
