"""Sampler: logits to token ids. One row's token depends on that row alone, whatever shares its batch.

A row is greedy (the highest logit, the lowest id among equals) or sampled:

1. its logits are changed: penalties, bias, what must not come (logit_changes.py);
2. top-k, top-p and min-p, in this order, each say how small a logit may be; a token stays if it passes all three;
3. the token is the argmax of (logit - highest logit) / temperature + Gumbel noise, which is a draw from the softmax of
   the kept tokens. The noise is counted (core/counted_random.py): a function of seed, choice, position and token id.

The tie rule: a filter keeps or drops tokens of equal logits together. So top-k keeps more than k tokens when others
equal the k-th, and top-p keeps all tokens that equal the last one needed to reach its mass. A filter is then one
threshold, which every device can apply without sorting.

Log-probabilities are those of the logits as they came from the model: of the chosen token, and of the likeliest ones.
"""

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..core.errors import LocalProtocolError
from ..core.request import SamplingParams
from ..kernels.cpu import token_logprobs
from .launched import AskedLogprobs, KnownTokens, LaunchedLogprobs, LaunchedTokens, record_event
from .logit_changes import changed_on_host
from .philox import MAX_GUMBEL, gumbel, random_words, seed_words
from .token_counts import TokenCounts

# Below this temperature float32 logits that differ at all are too far apart for the noise to matter.
_GREEDY_TEMPERATURE = 1e-7
# Top-p looks first at the tokens whose probability is at least exp(-12) of the best one's.
_NEAR = 12.0


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to choose the next token of one sequence."""

    params: SamplingParams
    choice: int
    position: int  # index of the sampled token in prompt + output
    suppress: tuple[int, ...] = ()  # ids that must not come (end of sequence while min_tokens is not reached)
    feedback_slot: int = -1  # >= 0: the token is left there for the next step too
    counts: TokenCounts | None = None  # for the penalties; None: there are none
    allowed: NDArray[np.int32] | None = None  # bit mask of the tokens that may come, [ceil(vocab_size / 32)]

    @property
    def greedy(self) -> bool:
        return self.params.greedy or self.params.temperature < _GREEDY_TEMPERATURE


class Sampler(Protocol):
    """What computes the tokens. Everything a draw depends on is in its row."""

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> LaunchedTokens:
        """Start choosing one token per row of `logits` `[n, vocab_size]` float32, which is left as it is.

        The tokens go to the rows' feedback slots as well, on the device. None for a row without a finite highest logit
        (the model overflowed, or all is suppressed): it must not cost the others their tokens. What rows refer to may
        change once this returns. Raises LocalProtocolError if the numbers of rows differ.
        """

    def score(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> LaunchedLogprobs:
        """Start computing the log-probabilities of one given token, and of the likeliest ones, per row of `logits`."""


class HostSampler:
    """Sampler of the CPU path; `feedback` `[slots]` int64 is what the next steps read."""

    def __init__(self, feedback: Tensor):
        self._feedback = feedback

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> KnownTokens:
        token_ids = self.sample(logits, rows)
        for row, token_id in zip(rows, token_ids, strict=True):
            if row.feedback_slot >= 0:
                self._feedback[row.feedback_slot] = -1 if token_id is None else token_id
        asked = [i for i, row in enumerate(rows) if row.params.num_logprobs is not None]
        return KnownTokens(token_ids, self._ask(logits, rows, token_ids, asked) if asked else None)

    @staticmethod
    def _ask(
        logits: Tensor, rows: Sequence[SamplingRow], token_ids: list[int | None], asked: list[int]
    ) -> AskedLogprobs:
        num_top = [num_top_of(rows[i], logits.shape[1]) for i in asked]
        chosen = torch.tensor([token_ids[i] or 0 for i in asked])  # 0: without a token nobody reads them
        scores = token_logprobs(logits[asked], chosen, max(num_top))
        return AskedLogprobs(asked, LaunchedLogprobs(*scores, num_top, record_event(logits.device)))

    @torch.inference_mode()
    def score(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> LaunchedLogprobs:
        check_rows(logits, token_ids)
        num_top = min(num_top, logits.shape[1])
        scores = token_logprobs(logits, torch.tensor(token_ids), num_top)
        return LaunchedLogprobs(*scores, [num_top] * len(logits), record_event(logits.device))

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
        """One token id per row, or None; see `Sampler.launch`."""
        check_rows(logits, rows)
        logits = changed_on_host(logits, rows)
        best, token_ids = logits.max(-1)
        chosen = [i if ok else None for i, ok in zip(token_ids.tolist(), best.isfinite().tolist(), strict=True)]
        drawn = [i for i, row in enumerate(rows) if not row.greedy and chosen[i] is not None]
        if drawn:
            some = slice(None) if len(drawn) == len(rows) else drawn
            for i, token_id in zip(drawn, _Draw(logits[some], [rows[i] for i in drawn]).run(), strict=True):
                chosen[i] = token_id
        return chosen


def check_rows(logits: Tensor, rows: Sized) -> None:
    if len(rows) != len(logits):
        raise LocalProtocolError(f"{len(logits)} rows of logits for {len(rows)} sampling rows")


def num_top_of(row: SamplingRow, vocab_size: int) -> int:
    """How many of the likeliest tokens the row asks for."""
    return min(row.params.num_logprobs or 0, vocab_size)


def lowest_kept(logits: Tensor, params: SamplingParams) -> float:
    """The logit that a token of `logits` `[vocab_size]` needs to pass top-k, top-p and min-p.

    top_k counts tokens; top_p adds up probabilities, in falling order and among the tokens top_k kept, until the sum
    reaches it; min_p is relative to the best token's probability.
    """
    lowest = -math.inf
    if 0 < params.top_k < len(logits):
        lowest = float(logits.topk(params.top_k).values[-1])
    if params.top_p < 1.0:
        kept = logits if lowest == -math.inf else logits[logits >= lowest]
        lowest = max(lowest, _top_p_lowest(kept, params))
    if params.min_p > 0.0:
        lowest = max(lowest, float(logits.max()) + math.log(params.min_p) * params.temperature)
    return lowest


def _top_p_lowest(logits: Tensor, params: SamplingParams) -> float:
    best = float(logits.max())
    wanted = params.top_p * float(_z(logits, best, params.temperature).exp().sum())
    near = logits[logits >= best - _NEAR * params.temperature]
    for candidates in (near, logits):  # sorting the whole vocabulary is rarely needed
        descending = candidates.sort(descending=True).values
        mass = _z(descending, best, params.temperature).exp().cumsum(0)
        if float(mass[-1]) >= wanted:
            return float(descending[int(torch.searchsorted(mass, wanted))])
    return float(descending[-1])  # rounding left the sum of all just below


def _z(logits: Tensor, best: float | Tensor, temperature: float | Tensor) -> Tensor:
    return (logits.double() - best) / temperature


class _Draw:
    """Gumbel-max over the sampled rows of one batch.

    Random words come for four neighbouring tokens at once, so the vocabulary is cut into groups of four. A group
    whose best token could not win even with the largest noise needs none; that spares most of a real vocabulary.
    All work is elementwise or within one row.
    """

    def __init__(self, logits: Tensor, rows: list[SamplingRow]):
        padding = -logits.shape[1] % 4
        padded = F.pad(logits, (0, padding), value=-torch.inf) if padding else logits
        self._groups = padded.view(len(rows), -1, 4)  # [n, vocab_size / 4, 4]
        self._group_best = self._groups.amax(-1)  # [n, vocab_size / 4]
        self._best = self._group_best.amax(-1).double()  # [n]
        self._lowest = torch.tensor([lowest_kept(logits[i], row.params) for i, row in enumerate(rows)]).double()
        self._temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64)
        self._keys = torch.tensor([seed_words(row.params.seed) for row in rows]).t()  # [2, n]
        self._counters = torch.tensor([(row.choice, row.position) for row in rows]).t()  # [2, n]

    def run(self) -> list[int]:
        """One token id per row."""
        # The tokens near the best give a score that the others have to reach.
        rows, groups = self._at_least(self._best - self._temperature)
        score = torch.full_like(self._best, -torch.inf)
        score.scatter_reduce_(0, rows, self._scores(rows, groups).amax(-1), "amax")
        rows, groups = self._at_least(self._best + self._temperature * (score - MAX_GUMBEL))
        scores = self._scores(rows, groups)
        chosen = []
        first = 0
        for count in torch.bincount(rows).tolist():
            winner = int(scores[first : first + count].argmax())
            chosen.append(int(groups[first + winner // 4]) * 4 + winner % 4)
            first += count
        return chosen

    def _at_least(self, bound: Tensor) -> tuple[Tensor, Tensor]:
        """(row, group) pairs, row by row, of the groups that hold a kept token with a logit of `bound` `[n]`."""
        bound = torch.maximum(bound, self._lowest)
        rows, groups = (self._group_best >= bound.unsqueeze(1)).nonzero(as_tuple=True)
        return rows, groups

    def _scores(self, rows: Tensor, groups: Tensor) -> Tensor:
        """Tempered logit plus noise of each token in the groups, `[n, 4]`; -inf for tokens that are not kept."""
        choices, positions = self._counters[:, rows]
        noise = gumbel(random_words(self._keys[:, rows], choices, positions, groups))
        logits = self._groups[rows, groups].double()
        z = (logits - self._best[rows].unsqueeze(1)) / self._temperature[rows].unsqueeze(1)
        return (z + noise).masked_fill_(logits < self._lowest[rows].unsqueeze(1), -torch.inf)
