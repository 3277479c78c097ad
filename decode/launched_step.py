"""LaunchedStep: what the device has been given and the decode role has not collected yet."""

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..core.request import TokenLogprobs
from ..core.sequence import Sequence
from ..engine.launched import LaunchedLogprobs, LaunchedTokens, LayerProgress
from .entry import DecodeEntry


@dataclass(frozen=True)
class LaunchedScores:
    """Of a prompt's own tokens, those that come after its tokens from `start` on."""

    entry: DecodeEntry
    start: int
    slices: list[LaunchedLogprobs]

    def collect(self) -> None:
        """Wait for the device; its sequence may have more of its prompt from a cache from now on."""
        scores = self.entry.prompt_scores
        assert scores is not None
        scores.add(self.start, [score for part in self.slices for score in part.read()])
        self.entry.sequence.max_cached_tokens = scores.max_cached_tokens


@dataclass(frozen=True)
class LaunchedStep:
    """A forward pass with the sampling behind it, or only the sampling of first tokens after hand-overs."""

    chunks: list[tuple[Sequence, int]]
    sampled: list[DecodeEntry]  # each gets one token
    tokens: LaunchedTokens | None  # None: all chunks end within their prompts
    progress: LayerProgress
    number: int  # SequenceBlocks.step_launched
    hidden: Tensor | None = None  # a row for each of `sampled`, where others wait for that of one of them
    scores: ReadOnly[LaunchedScores] = ()
    silent: ReadOnly[DecodeEntry] = ()  # their prompts end here as well, and no token is wanted

    @cached_property
    def complete(self) -> set[str]:
        """Ids of the sequences of which everything that is known is computed now."""
        return {entry.sequence.request_id for entry in (*self.sampled, *self.silent)}

    def is_done(self) -> bool:
        return self.progress.is_done() if self.tokens is None else self.tokens.is_done()

    def token_ids(self) -> list[int | None]:
        """Wait for the device: a token for each of `sampled`, None where no logit is finite."""
        if self.tokens is not None:
            return self.tokens.token_ids()
        self.progress.wait()
        return []

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Index in `sampled` |-> what the model thought of its token; of those that ask."""
        return {} if self.tokens is None else self.tokens.logprobs()
