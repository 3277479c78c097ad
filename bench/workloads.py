"""Which requests a benchmark sends: sessions of one or more turns, all a pure function of options and seed.

Contents are drawn from an alphabet, either token ids or common words that most vocabularies hold as one token each.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import ConfigurationError
from .arrivals import poisson_arrivals
from .options import WorkloadOptions

_WORD_LIST = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what "
    "all were when we there can an your which their said if do will each about how up out them then she many some "
    "so these would other into has more her two like him see time could no make than first been its who now people "
    "my made over did down only way find use may water long little very after words called just where most know"
)
_WORDS = tuple(_WORD_LIST.split())

Symbols = list[int]  # token ids, or indices into the word list


@dataclass(frozen=True)
class Alphabet:
    """What contents are made of: symbols `low` to `high` - 1, rendered as token ids or, with `words`, as text."""

    low: int
    high: int
    words: tuple[str, ...] = ()

    @classmethod
    def of_token_ids(cls, vocab_size: int) -> "Alphabet":
        """Token ids without the first and last 1/32 of the vocabulary, where special tokens and padding live.

        Raises ConfigurationError for a vocabulary of fewer than 2 tokens.
        """
        if vocab_size < 2:
            raise ConfigurationError(f"--vocab-size {vocab_size}: prompts need at least 2 different tokens")
        return cls(vocab_size // 32, vocab_size - vocab_size // 32)

    @classmethod
    def of_words(cls) -> "Alphabet":
        """Common English words; a prompt of n words is about n tokens, and the server's usage has the true count."""
        return cls(0, len(_WORDS), _WORDS)

    def draw(self, generator: random.Random, count: int) -> Symbols:
        """`count` random symbols."""
        return generator.choices(range(self.low, self.high), k=count)

    def render(self, symbols: Symbols) -> list[int] | str:
        """What goes into the request: token ids, or text with each word after a space."""
        if not self.words:
            return symbols
        return "".join(f" {self.words[symbol]}" for symbol in symbols)


@dataclass(frozen=True)
class Turn:
    """One request: what it adds to the conversation and how many tokens it asks for."""

    content: list[int] | str
    num_output_tokens: int


@dataclass(frozen=True)
class Session:
    """Turns that follow each other, each sent when the one before has ended."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Workload:
    """The sessions and, in an open loop, when each starts (seconds, ascending); `notes` are for the report."""

    sessions: Sequence[Session]
    arrivals_s: Sequence[float] | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


def synthetic_workload(options: WorkloadOptions, alphabet: Alphabet, rate: float | None) -> Workload:
    """The random, shared-prefix or multi-turn workload; with `rate` (requests/s), Poisson arrivals of its sessions."""
    generator = random.Random(f"{options.workload} {options.seed}")
    if options.workload == "multi-turn":
        sessions = _conversations(options, alphabet, generator)
    else:
        sessions = _single_requests(options, alphabet, generator)
    if rate is None:
        return Workload(sessions)
    return Workload(sessions, poisson_arrivals(len(sessions), options.num_requests / rate, options.seed))


def warmup_workload(options: WorkloadOptions, alphabet: Alphabet, count: int) -> Workload:
    """`count` random requests whose prompts the measured workload does not repeat."""
    generator = random.Random(f"warmup {options.seed}")
    return Workload(
        [_single_turn(options, alphabet.draw(generator, options.input_len), alphabet) for _ in range(count)]
    )


def _single_requests(options: WorkloadOptions, alphabet: Alphabet, generator: random.Random) -> list[Session]:
    prefixes: list[Symbols] = [[]]
    if options.workload == "shared-prefix":
        prefixes = [alphabet.draw(generator, options.prefix_len) for _ in range(options.num_prefixes)]
    return [
        _single_turn(options, generator.choice(prefixes) + alphabet.draw(generator, options.input_len), alphabet)
        for _ in range(options.num_requests)
    ]


def _single_turn(options: WorkloadOptions, symbols: Symbols, alphabet: Alphabet) -> Session:
    return Session((Turn(alphabet.render(symbols), options.output_len),))


def _conversations(options: WorkloadOptions, alphabet: Alphabet, generator: random.Random) -> list[Session]:
    contents = [alphabet.draw(generator, options.input_len) for _ in range(options.num_requests)]
    turns = [Turn(alphabet.render(content), options.output_len) for content in contents]
    return [Session(tuple(turns[i : i + options.turns])) for i in range(0, len(turns), options.turns)]
