"""From token ids to the text that a client sees: one Choice for each prompt of a response. No I/O."""

from collections.abc import Sequence

import msgspec

from ..core.request import FinishReason
from ..vocab.detokenizer import Detokenizer
from ..vocab.stop import StopMatcher
from ..vocab.tokenizer import Tokenizer
from .generation import Generation
from .openai_format import FinishedChoice, PromptTokensDetails, Usage


class Delta(msgspec.Struct, frozen=True):
    """What is new of one choice. `stopped_early`: a stop string ended it, which its worker does not know."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stopped_early: bool


class Choice:
    """The text of one generation.

    End-of-sequence and stop tokens, and stop strings, are no part of the text. `completion_tokens` counts generated
    tokens: the end-of-sequence token too, and with a stop string up to the token that completed it. Tokens are looked
    at one by one when there are stop strings, so neither depends on how they arrive.
    """

    def __init__(self, index: int, generation: Generation, tokenizer: Tokenizer, stop: Sequence[str]):
        self.index = index
        self.generation = generation
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopMatcher(stop)
        self._step = 1 if stop else 0  # tokens looked at together; 0: all there are
        self._parts: list[str] = []
        self.started = False

    def advance(self) -> Delta | None:
        """Takes in the tokens that have arrived; None when nothing is new for the client."""
        if self.finish_reason is not None:
            return None
        new = self.generation.output_token_ids[self.completion_tokens :]
        text = ""
        for start in range(0, len(new), self._step or max(len(new), 1)):
            text += self._push(new[start : start + self._step] if self._step else new)
            if self._stop.matched is not None:
                seen = new[: start + self._step]
                return self._delta(text, seen, FinishReason.STOP, stopped_early=self.generation.finish_reason is None)
        reason = self.generation.finish_reason
        if reason is not None:
            text += self._rest()
            reason = FinishReason.STOP if self._stop.matched is not None else reason
        return self._delta(text, new, reason, stopped_early=False) if new or text or reason else None

    def finished(self) -> FinishedChoice:
        """The whole choice; it must have ended."""
        assert self.finish_reason is not None
        token_ids = self.generation.output_token_ids[: self.completion_tokens]
        prompt = self.generation.prompt.token_ids
        return FinishedChoice(self.index, "".join(self._parts), self.finish_reason, token_ids, prompt)

    def _delta(self, text: str, token_ids: list[int], reason: FinishReason | None, *, stopped_early: bool) -> Delta:
        self.finish_reason = reason
        self._parts.append(text)
        return Delta(self.index, text, token_ids, reason, stopped_early)

    def _push(self, token_ids: list[int]) -> str:
        self.completion_tokens += len(token_ids)
        if self._ends_with_stop_token():
            token_ids = token_ids[:-1]
        return self._stop.push(self._detokenizer.push(token_ids))[0]

    def _ends_with_stop_token(self) -> bool:
        """Is the last token taken in the one that ended the generation?"""
        generation = self.generation
        return (
            generation.finish_reason is FinishReason.STOP
            and self.completion_tokens == len(generation.output_token_ids)
            and generation.output_token_ids[-1] in generation.prompt.sampling.stop_token_ids
        )

    def _rest(self) -> str:
        text, stopped = self._stop.push(self._detokenizer.finish())
        return text if stopped else text + self._stop.flush()


def usage_of(choices: Sequence[Choice]) -> Usage:
    """Counts over all choices of a response."""
    prompt_tokens = sum(len(choice.generation.prompt.token_ids) for choice in choices)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    cached_tokens = sum(choice.generation.num_cached_tokens or 0 for choice in choices)
    return Usage(
        prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
    )
