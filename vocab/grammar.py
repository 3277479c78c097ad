"""Grammars at work: which tokens may come next. llguidance compiles them and computes the masks.

A grammar travels as one string (vocab/grammar_source.py makes it); every process that needs it compiles it by itself,
under the same limits. Compiling and masks run without the interpreter lock.
"""

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import llguidance
import numpy as np
from numpy.typing import NDArray

from ..core.errors import BatonError, ConfigurationError
from .tokenizer import Tokenizer

_LONGEST_ERROR = 300  # characters of llguidance's complaint that reach a client
_MANY_CORES = 8
_MOST_THREADS = 8

# What compiling one grammar, and one step with it, may cost (llguidance's units; about 50 of fuel, 20 items a µs at
# start, 14 of fuel a µs in a step). They bound memory and the time of a step; the time of compiling is bounded by
# vocab/grammar_checker.py, for some schemas take minutes inside all of them.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,  # else errors hold the parser's whole state
)


class GrammarError(BatonError):
    """A grammar cannot be used, or an answer has left it. The text is meant for the client."""


class GrammarMatcher:
    """One answer on its way through its grammar. Not thread-safe; `fill` and `fill_all` may run on any one thread."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def copy(self) -> "GrammarMatcher":
        """One at the same place that goes its own way: of another answer to the same request."""
        return GrammarMatcher(self._matcher.deep_copy())

    def advance(self, token_id: int) -> None:
        """The answer continues with this token. Raises GrammarError when the grammar does not allow it."""
        if not self._matcher.consume_token(token_id):
            raise GrammarError(f"the grammar does not allow token {token_id} here: {self._error()}")

    def fill(self, row: NDArray[np.int32]) -> None:
        """Bit i of `row` ([ceil(vocab_size / 32)], contiguous) becomes whether token i may come next.

        There always is one: when the grammar is complete it is the end tokens. Raises GrammarError when the step took
        more than the limits allow.
        """
        self.compute(row)
        self.check()

    def compute(self, row: NDArray[np.int32]) -> None:
        """`fill`, but a failure is told by `check`."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def check(self) -> None:
        """Raises GrammarError when a mask could not be computed (`fill_all` does not raise)."""
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {self._error()}")

    @property
    def is_complete(self) -> bool:
        """Whether only an end token may come."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here (more may be allowed too)."""
        return bool(self._matcher.is_accepting())

    def _error(self) -> str:
        return _short(self._matcher.get_error())


class GrammarCompiler:
    """Grammars for one model. Thread-safe; takes about a second to make for a large vocabulary.

    `vocab_size` is the width of the model's logits; `eos_token_ids` are the tokens that may end an answer (empty: the
    tokenizer's own).
    """

    def __init__(
        self, model_folder: Path, vocab_size: int, eos_token_ids: Sequence[int], num_threads: int | None = None
    ):
        """`num_threads` fill the masks of a batch. None: half the cores where there are many, else 1; to hand work over
        then saves nothing (8 masks on 2 free cores: 0.14 ms, and 0.19 one after the other), and costs on busy ones.

        Raises ConfigurationError for a tokenizer that llguidance cannot read, or a model without an end token.
        """
        eos_token_ids = eos_token_ids or Tokenizer.from_folder(model_folder).eos_token_ids
        if not eos_token_ids:
            raise ConfigurationError(
                "structured output needs a token that ends an answer, and this model names none: "
                "set eos_token_id in its generation_config.json"
            )
        path = model_folder / "tokenizer.json"
        try:
            definition = path.read_text(encoding="utf-8")
            self._tokenizer = llguidance.LLTokenizer(definition, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{path} cannot be used for structured output ({str(error)[:_LONGEST_ERROR]}). "
                "Use a model with a tokenizer.json of the BPE kind"
            ) from error
        self.mask_words = -(-vocab_size // 32)
        cores = os.cpu_count() or 1
        self._num_threads = num_threads or (min(cores // 2, _MOST_THREADS) if cores >= _MANY_CORES else 1)

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        """Its threads start when they are first needed: the process that checks grammars forks, and must have none."""
        return llguidance.LLExecutor(self._num_threads)

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the beginning of an answer. Raises GrammarError for a grammar that cannot be compiled."""
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_short(matcher.get_error()))
        return GrammarMatcher(matcher)

    def check(self, grammar: str) -> str | None:
        """Why the grammar cannot be used, None when it can: it compiles, and there is a first token."""
        try:
            self.matcher(grammar).fill(np.zeros(self.mask_words, np.int32))
        except GrammarError as error:
            return str(error)
        return None

    def fill_all(self, matchers: Sequence[GrammarMatcher], bitmask: NDArray[np.int32]) -> None:
        """`fill` of all matchers, in parallel if there are cores for it: matcher i into row i of `bitmask` (contiguous,
        [len(matchers) or more, mask_words]). A matcher that fails tells so in `check`; the others are not hurt.
        """
        assert bitmask.flags["C_CONTIGUOUS"]
        assert bitmask.dtype == np.int32
        assert bitmask.shape[1] == self.mask_words
        if self._num_threads == 1:
            for matcher, row in zip(matchers, bitmask, strict=False):
                matcher.compute(row)
            return
        rows = [(matcher._matcher, index) for index, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(rows, bitmask.ctypes.data, bitmask.shape[1] * 4, bitmask.shape[0])


def _short(text: str) -> str:
    """llguidance's complaint in one line."""
    line = " ".join(text.split("<state>")[0].split())
    return line if len(line) <= _LONGEST_ERROR else f"{line[: _LONGEST_ERROR - 3]}..."
