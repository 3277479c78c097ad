"""Measuring: what the router and the planner of roles want to know of the requests that have been. Pure."""

import math
from collections import deque
from itertools import pairwise
from statistics import fmean, pstdev

from .capacity import Mix, PromptClass
from .forecast import Work
from .ways import Measured

_TRANSFER_TOKENS = 100_000  # that the mean time of handing over is taken over
_LEAST_OVERHEAD_S = 1e-4
_STEP = 1.05  # by which the overhead follows each error: it comes to rest where half of them are positive
_ANSWERS = 256  # that their mean length is taken over
_MIX_S = 30.0  # prompts and answers so old are left out of the mix,
_KEPT_IN_MIX = 128  # but for so many of each, as lengths vary much,
_OLD_S = 900.0  # and those are left out when they are so old
_MOST_IN_MIX = 256
_LEAST_IN_MIX = 8
# Prompts are told apart by size, and more finely where targets are missed: 32nds of them, where classes begin.
_BOUNDS = (0, 4, 8, 12, 16, 20, *range(24, 33))
_ANSWER_CLASSES = 8


class Measuring:
    """Short hand-overs, which are mostly overhead, count as little as their tokens."""

    def __init__(self, tpot_target_s: float | None) -> None:
        self._tpot_target_s = tpot_target_s
        self._tokens = 0.0
        self._seconds = 0.0
        self._answer_tokens = 0.0
        self._num_answers = 0
        self._overhead_s = _LEAST_OVERHEAD_S
        self._prompts: deque[tuple[float, Work, int]] = deque(maxlen=_MOST_IN_MIX)
        self._answers: deque[tuple[float, int]] = deque(maxlen=_MOST_IN_MIX)

    @property
    def measured(self) -> Measured:
        """So far."""
        transfer_s = self._seconds / self._tokens if self._tokens else 0.0
        return Measured(transfer_s, self._answer_tokens, self._tpot_target_s, self._overhead_s)

    def handed_over(self, num_tokens: int, seconds: float) -> None:
        """So many tokens took so long to be copied and checked, on both sides together."""
        keep = max(1.0 - num_tokens / _TRANSFER_TOKENS, 0.0)
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds

    def first_token(self, predicted_s: float, measured_s: float) -> None:
        """It has come, so long after the dispatch. The prediction held the overhead of that time.

        Many were sent out before the first of them could teach anything: however many are late, none of them raises the
        overhead above what its own first token took in all.
        """
        if measured_s > predicted_s:
            self._overhead_s = max(self._overhead_s, min(self._overhead_s * _STEP, measured_s))
        else:
            self._overhead_s = max(self._overhead_s / _STEP, _LEAST_OVERHEAD_S)

    def answered(self, num_tokens: int, now: float) -> None:
        """An answer of so many tokens has ended."""
        self._answers.append((now, num_tokens))
        self._num_answers = min(self._num_answers + 1, _ANSWERS)
        self._answer_tokens += (num_tokens - self._answer_tokens) / self._num_answers

    def sent(self, work: Work, num_tokens: int, now: float) -> None:
        """A prompt of so many tokens was sent out, and `work` is what is computed of it."""
        self._prompts.append((now, work, num_tokens))

    def mix(self, now: float) -> Mix | None:
        """Of late; None: too few to tell."""
        for seen in (self._prompts, self._answers):
            while seen and now - seen[0][0] > (_MIX_S if len(seen) > _KEPT_IN_MIX else _OLD_S):
                seen.popleft()
        total, num_answers = len(self._prompts), len(self._answers)
        if min(total, num_answers) < _LEAST_IN_MIX:
            return None
        ordered = sorted(self._prompts, key=lambda prompt: prompt[1].num_tokens)
        bounds = [total * bound // _BOUNDS[-1] for bound in _BOUNDS]
        prompts = tuple(_class_of(ordered[low:high], total) for low, high in pairwise(bounds) if high > low)
        lengths = sorted(tokens for _, tokens in self._answers)
        ends = [num_answers * number // _ANSWER_CLASSES for number in range(_ANSWER_CLASSES + 1)]
        answers = tuple(sum(lengths[low:high]) / (high - low) for low, high in pairwise(ends))
        tokens = [work.num_tokens for _, work, _ in ordered]
        return Mix(prompts, answers, pstdev(tokens) / max(fmean(tokens), 1.0) / math.sqrt(total))


def _class_of(prompts: list[tuple[float, Work, int]], total: int) -> PromptClass:
    count = len(prompts)
    num_tokens = sum(work.num_tokens for _, work, _ in prompts)
    products = sum(work.products for _, work, _ in prompts)
    return PromptClass(
        count / total, Work(round(num_tokens / count), products / count), sum(tokens for *_, tokens in prompts) / count
    )
