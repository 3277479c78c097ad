"""Constraint: where the answer of one choice stands in the grammar of its request, and what may come next."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..vocab.grammar import GrammarCompiler, GrammarError, GrammarMatcher

Words = NDArray[np.int32]  # [ceil(vocab_size / 32)]: bit i % 32 of word i // 32 is token i's


class Constraint:
    """The grammar says what may come; where the answer may end, all `end_token_ids` may come, whichever it knows.

    While an end is not wanted (`min_tokens`) none of them may come, unless nothing else can.
    """

    def __init__(self, matcher: GrammarMatcher, end_token_ids: Iterable[int], mask_words: int):
        self.matcher = matcher
        self._end_token_ids = frozenset(end_token_ids)
        self._ends = np.zeros(mask_words, np.int32)
        for token_id in self._end_token_ids:
            if 0 <= token_id < 32 * mask_words:
                self._ends.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        self.error = ""  # why nothing may come any more

    def is_end(self, token_id: int) -> bool:
        return token_id in self._end_token_ids

    def advance(self, token_id: int) -> None:
        """The answer goes on with this token. When the grammar does not know it, nothing may follow."""
        try:
            self.matcher.advance(token_id)
        except GrammarError as error:
            self.error = str(error)

    def allow(self, row: Words, *, may_end: bool) -> None:
        """Turn what the grammar itself allows into what may come next, in place; all zeros when nothing may."""
        try:
            self.matcher.check()
        except GrammarError as error:
            self.error = self.error or str(error)
        if self.error:
            row[:] = 0
            return
        if self.matcher.is_accepting:
            row |= self._ends
        if not may_end and (others := row & ~self._ends).any():
            row[:] = others
        if not row.any():
            self.error = "the grammar allows no token here"


def fill_masks(compiler: GrammarCompiler, constraints: Sequence[tuple[Constraint, bool]]) -> list[Words]:
    """What may come next for each of them, all at once; (constraint, whether its answer may end)."""
    masks = np.zeros((len(constraints), compiler.mask_words), np.int32)
    compiler.fill_all([constraint.matcher for constraint, _ in constraints], masks)
    for (constraint, may_end), row in zip(constraints, masks, strict=True):
        constraint.allow(row, may_end=may_end)
    return list(masks)
