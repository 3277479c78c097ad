"""How long answers get, and how many blocks those in flight will need at their worst moment. Pure.

`AnswerLengths` learns from the last answers. One that was cut off at its max_tokens says only that it would have been
at least so long, which is what Kaplan and Meier's estimator is for (J. Am. Stat. Assoc. 53, 1958): of the answers that
are known to have got to a length, the share that ended there.

`Peak` adds up what requests hold. All that decode grow by a token a step, so the sum falls only when one ends, and its
greatest values are those just before an end. With the requests sorted by the tokens they still get, r_1 >= r_2 >= ...,
before the k-th one ends

    tokens(k) = sum of current_i over i <= k  +  k * r_k

A newcomer adds to those ends that come before its own, and has an end of its own. This looks at the future of what is
in flight, as the scheduler of Gong et al. does (ASPLOS'25), instead of giving each request its whole length at once.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import accumulate, count
from operator import add, mul, neg

UNKNOWN_GROWTH = 256  # tokens that an answer is expected to get still, where nothing has been learned
_REMEMBERED = 256  # answers
_LEAST_KNOWN = 16  # answers, before anything is concluded from them
_BITS = 40  # of a packed number are for the tokens held now
_MASK = (1 << _BITS) - 1
_NEW_ANSWERS = 8  # change an estimate; fewer are not worth the time
_QUANTILE = 0.8  # of the answers are no longer than predicted; the worker preempts when too many are


class AnswerLengths:
    """`learn` each answer that has ended, `remaining` predicts."""

    def __init__(self) -> None:
        self._answers: deque[tuple[int, bool]] = deque(maxlen=_REMEMBERED)
        # Lengths at which answers ended, ascending, and the negated share of answers that got beyond each.
        self._ends: list[int] = []
        self._beyond: list[float] = []
        self._longest = 0
        self._num_new = _NEW_ANSWERS  # since the last estimate

    def learn(self, num_tokens: int, *, was_cut: bool) -> None:
        """An answer ended with so many tokens. `was_cut`: by its max_tokens, else by itself."""
        self._answers.append((num_tokens, was_cut))
        self._num_new += 1

    def remaining(self, num_generated: int, max_tokens: int) -> int:
        """Tokens that an answer which has `num_generated` so far is predicted to get still; at most max_tokens in all.

        The predicted length never falls while the answer gets longer.
        """
        return min(self._length(num_generated), max_tokens) - num_generated

    def _length(self, num_generated: int) -> int:
        unknown = num_generated + UNKNOWN_GROWTH
        if len(self._answers) < _LEAST_KNOWN:
            return unknown
        if self._num_new >= _NEW_ANSWERS:
            self._estimate()
        first = bisect_right(self._ends, num_generated)
        beyond = -self._beyond[first - 1] if first else 1.0
        index = bisect_left(self._beyond, -beyond * (1 - _QUANTILE) - 1e-9, first)
        return self._ends[index] if index < len(self._ends) else max(self._longest, unknown)

    def _estimate(self) -> None:
        self._num_new = 0
        self._ends, self._beyond = [], []
        answers = sorted(self._answers)  # at one length, those that ended come before those that were cut
        num_left, beyond = len(answers), 1.0
        for length, was_cut in answers:
            if not was_cut:
                beyond *= 1 - 1 / num_left
                if self._ends and self._ends[-1] == length:
                    self._beyond[-1] = -beyond
                else:
                    self._ends.append(length)
                    self._beyond.append(-beyond)
            num_left -= 1
        self._longest = answers[-1][0]


class Peak:
    """Of requests given as (tokens held now, tokens still to come). O(n log n) to build, O(log n) to ask.

    Blocks are never fewer than the requests really need: for each, the last block counts as if just begun.
    """

    def __init__(self, requests: Iterable[tuple[int, int]], block_size: int):
        self._block_size = block_size
        # Pairs packed into numbers, which sort several times as fast; the longest-lived come first.
        ordered = sorted([(remaining << _BITS) + tokens + block_size - 1 for tokens, remaining in requests])
        ordered.reverse()
        remaining = [packed >> _BITS for packed in ordered]
        # Of the k longest-lived, for k = 0, 1 ...: tokens held now.
        self._held = list(accumulate([packed & _MASK for packed in ordered], initial=0))
        ends = list(map(add, self._held[1:], map(mul, remaining, count(1))))
        self._negated = list(map(neg, remaining))  # ascending
        self._tokens = max(ends, default=0)
        # The greatest of tokens(j) + r_j over j > k: what a newcomer that is still there finds, with its own growth.
        self._with_growth = list(accumulate(map(add, reversed(ends), reversed(remaining)), max, initial=0))
        self._with_growth.reverse()

    @property
    def blocks(self) -> int:
        """That the requests need together at their worst moment."""
        return self._tokens // self._block_size

    def blocks_now_with(self, tokens: int) -> int:
        """That the requests hold at present, and one more that holds `tokens`."""
        return (self._held[-1] + tokens + self._block_size - 1) // self._block_size

    def blocks_with(self, tokens: int, remaining: int) -> int:
        """The same with one request more."""
        held = tokens + self._block_size - 1
        num_after = bisect_right(self._negated, -remaining)  # that end with it or after it
        own_end = self._held[num_after] + num_after * remaining + held + remaining
        others_end = self._with_growth[bisect_left(self._negated, -remaining)] + held
        return max(self._tokens, own_end, others_end) // self._block_size
