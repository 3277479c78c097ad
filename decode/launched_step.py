"""LaunchedStep: what the device has been given and the decode role has not collected yet."""

from dataclasses import dataclass

from torch import Tensor

from ..core.sequence import Sequence
from ..engine.launched import LaunchedTokens, LayerProgress
from .entry import DecodeEntry


@dataclass(frozen=True)
class LaunchedStep:
    """A forward pass with the sampling behind it, or only the sampling of first tokens after hand-overs."""

    chunks: list[tuple[Sequence, int]]
    sampled: list[DecodeEntry]  # each gets one token
    tokens: LaunchedTokens | None  # None: all chunks end within their prompts
    progress: LayerProgress
    number: int  # SequenceBlocks.step_launched
    hidden: Tensor | None = None  # a row for each of `sampled`, where others wait for that of one of them

    def is_done(self) -> bool:
        return self.progress.is_done() if self.tokens is None else self.tokens.is_done()

    def token_ids(self) -> list[int | None]:
        """Wait for the device: a token for each of `sampled`, None where no logit is finite."""
        if self.tokens is not None:
            return self.tokens.token_ids()
        self.progress.wait()
        return []
