"""What may come next of one answer: the grammar's word, the ends, and min_tokens, with matchers made by hand."""

import numpy as np
import pytest

from baton.decode.constraint import Constraint, fill_masks
from baton.vocab.grammar import GrammarError

WORDS = 3
EOS, STOP = 64, 70  # of two words


def words(*token_ids: int) -> np.ndarray:
    bits = np.zeros(32 * WORDS, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class ByHand:
    """A matcher that allows `token_ids`."""

    def __init__(self, *token_ids: int, is_accepting: bool = False, fails: bool = False):
        self.token_ids, self.is_accepting, self.fails = token_ids, is_accepting, fails

    def advance(self, token_id: int) -> None:
        if token_id not in self.token_ids:
            raise GrammarError(f"not {token_id}")

    def check(self) -> None:
        if self.fails:
            raise GrammarError("too much")


class Compiler:
    mask_words = WORDS

    def fill_all(self, matchers, bitmask) -> None:
        for matcher, row in zip(matchers, bitmask, strict=True):
            row[:] = words(*matcher.token_ids)


def allowed(matcher: ByHand, *, may_end: bool = True, ends: tuple[int, ...] = (EOS, STOP)) -> set[int]:
    (row,) = fill_masks(Compiler(), [(Constraint(matcher, ends, WORDS), may_end)])
    return {token for token in range(32 * WORDS) if int(row[token // 32]) >> token % 32 & 1}


def test_inside_only_what_the_grammar_allows() -> None:
    assert allowed(ByHand(0, 31, 32, 95)) == {0, 31, 32, 95}


def test_where_it_may_end_all_end_tokens_may_come() -> None:
    assert allowed(ByHand(5, EOS, is_accepting=True)) == {5, EOS, STOP}


def test_when_it_is_complete_nothing_but_an_end() -> None:
    assert allowed(ByHand(EOS, is_accepting=True)) == {EOS, STOP}


def test_an_end_that_is_not_wanted_yet() -> None:
    assert allowed(ByHand(5, EOS, is_accepting=True), may_end=False) == {5}
    assert allowed(ByHand(5, STOP), may_end=False) == {5}


def test_min_tokens_never_leaves_a_row_without_candidates() -> None:
    assert allowed(ByHand(EOS, is_accepting=True), may_end=False) == {EOS, STOP}


def test_end_tokens_outside_of_the_vocabulary_are_passed_over() -> None:
    assert allowed(ByHand(5, is_accepting=True), ends=(-1, EOS, 10**6)) == {5, EOS}


@pytest.mark.parametrize(
    ("matcher", "error"), [(ByHand(), "the grammar allows no token here"), (ByHand(1, 2, fails=True), "too much")]
)
def test_a_dead_end_says_why(matcher: ByHand, error: str) -> None:
    constraint = Constraint(matcher, (EOS,), WORDS)
    other = Constraint(ByHand(7), (EOS,), WORDS)
    stuck, fine = fill_masks(Compiler(), [(constraint, True), (other, True)])
    assert not stuck.any()
    assert constraint.error == error
    assert fine.tolist() == words(7).tolist()


def test_a_token_that_the_grammar_does_not_know_is_the_end_of_it() -> None:
    constraint = Constraint(ByHand(1), (EOS,), WORDS)
    constraint.advance(1)
    assert constraint.error == ""
    constraint.advance(2)
    (row,) = fill_masks(Compiler(), [(constraint, True)])
    assert not row.any()
    assert constraint.error == "not 2"


def test_which_tokens_end_it() -> None:
    constraint = Constraint(ByHand(), (EOS, STOP), WORDS)
    assert [constraint.is_end(token) for token in (EOS, STOP, 3)] == [True, True, False]
