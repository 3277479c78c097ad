"""From token ids to what a client sees: one Choice for each answer of a response. No I/O."""

from collections.abc import Sequence

from ..core.errors import LocalProtocolError
from ..core.request import FinishReason
from ..vocab.detokenizer import Detokenizer
from ..vocab.stop import StopMatcher
from ..vocab.tokenizer import Tokenizer
from .deltas import Content, Delta, Echo, FinishedChoice, Piece, PieceParser, PlainText, ScoredToken, ToolCallPiece
from .generation import Generation
from .openai.answers import PromptTokensDetails, Usage
from .openai.request import TextRules

TOOL_CALLS = "tool_calls"  # why an answer ended that calls tools


class Choice:
    """The text of one generation; `lead` is the first one of the same prompt, which knows the prompt's scores.

    End-of-sequence and stop tokens, and stop strings, are no part of the text unless `rules.include_stop`.
    `completion_tokens` counts generated tokens: the end-of-sequence token too, and with a stop string up to the token
    that completed it. Tokens are looked at one by one when there are stop strings, so neither depends on how they
    arrive. As for end tokens, stop strings do not count before `min_tokens`.
    """

    def __init__(
        self,
        index: int,
        generation: Generation,
        lead: Generation,
        tokenizer: Tokenizer,
        rules: TextRules,
        parser: PieceParser,
    ):
        self.index = index
        self.generation = generation
        self.lead = lead
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.started = False
        self._rules = rules
        self._detokenizer = Detokenizer(tokenizer, rules.skip_special_tokens)
        self._stop = StopMatcher(rules.stop)
        self._step = 1 if rules.stop else 0  # tokens looked at together; 0: all there are
        self._parser = parser
        self._pieces: list[Piece] = []
        self._token_ended_it = False
        self._told_echo = False
        prompt = generation.prompt
        # Then a token that is not the last one is its text, and nothing else has to be looked at.
        self._is_plain = (
            not rules.stop
            and type(parser) is PlainText
            and prompt.sampling.num_logprobs is None
            and prompt.echo is None
        )

    @property
    def is_only_text(self) -> bool:
        """Nothing but the text of tokens is to be told of it now: it has begun, and has not ended."""
        return self._is_plain and self.started and not self.generation.ended

    @property
    def num_untold_tokens(self) -> int:
        """That have arrived and were not taken in."""
        return len(self.generation.output_token_ids) - self.completion_tokens

    def advance(self, most_tokens: int | None = None) -> Delta | None:
        """Takes in tokens that have arrived, `most_tokens` or all; None when nothing is new for the client."""
        if self.finish_reason is not None or self._awaits_prompt_logprobs():
            return None
        stop = None if most_tokens is None else self.completion_tokens + most_tokens
        new = self.generation.output_token_ids[self.completion_tokens : stop]
        reason = self.generation.finish_reason if len(new) == self.num_untold_tokens else None
        if self._is_plain and reason is None:
            return self._plain_delta(new) if new else None
        text = ""
        stopped_early = False
        for start in range(0, len(new), self._step or max(len(new), 1)):
            text += self._push(new[start : start + self._step] if self._step else new)
            if self._stop.matched is not None:
                new = new[: start + self._step]
                stopped_early = reason is None
                reason = FinishReason.STOP
                break
        else:
            if reason is not None:
                text += self._rest()
                reason = FinishReason.STOP if self._stop.matched is not None else reason
        if not new and not text and reason is None:
            return None
        if self._stop.matched is not None and self._rules.include_stop:
            text += self._stop.matched
        return self._delta(text, new, reason, stopped_early=stopped_early)

    def texts(self) -> list[Delta]:
        """Takes in the tokens that have arrived, each as a delta of its own; the answer must be only text."""
        new = self.generation.output_token_ids[self.completion_tokens :]
        return [self._plain_delta([token_id]) for token_id in new]

    def finished(self) -> FinishedChoice:
        """The whole choice; it must have ended."""
        assert self.finish_reason is not None
        return FinishedChoice(
            self.index,
            self._pieces,
            self.generation.output_token_ids[: self.completion_tokens],
            self.finish_reason,
            self.generation.prompt.token_ids,
            self._scores(0),
            self._echo(),
            self._stop.matched,
        )

    def _plain_delta(self, new: list[int]) -> Delta:
        self.completion_tokens += len(new)
        text = self._detokenizer.push(new)
        pieces: list[Piece] = [Content(text)] if text else []
        self._pieces += pieces
        return Delta(self.index, pieces, new)

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, which must have been scored; what `best_of` goes by."""
        scores = self.generation.logprobs[: self.completion_tokens]
        return sum(score.logprob for score in scores) / max(len(scores), 1)

    def _awaits_prompt_logprobs(self) -> bool:
        """They come with the first tokens of the lead, which need not be the first that come."""
        lead = self.lead
        if lead.prompt.num_prompt_logprobs is None or lead.prompt_logprobs is not None:
            return False
        if lead.finish_reason is not None:
            raise LocalProtocolError("an answer ended without the log-probabilities of its prompt")
        return True

    def _delta(self, text: str, new: list[int], reason: FinishReason | None, *, stopped_early: bool) -> Delta:
        pieces = self._parser.push(text)
        if reason is not None:
            pieces += self._parser.finish()
        self._pieces += pieces
        self.finish_reason = None if reason is None else self._told_reason(reason)
        echo, self._told_echo = None if self._told_echo else self._echo(), True
        scores = self._scores(self.completion_tokens - len(new))
        return Delta(self.index, pieces, new, self.finish_reason, scores, echo, stopped_early, self._stop.matched)

    def _told_reason(self, reason: FinishReason) -> str:
        if reason is not FinishReason.STOP:
            return reason
        calls_tools = any(isinstance(piece, ToolCallPiece) for piece in self._pieces)
        return TOOL_CALLS if calls_tools else reason

    def _push(self, token_ids: list[int]) -> str:
        self.completion_tokens += len(token_ids)
        if self._ends_with_stop_token():
            self._token_ended_it = True
            token_ids = token_ids[:-1]
        text = self._detokenizer.push(token_ids)
        if self._step and self.completion_tokens <= self.generation.prompt.sampling.min_tokens:
            return text
        return self._stop.push(text)[0]

    def _ends_with_stop_token(self) -> bool:
        """Is the last token taken in the one that ended the generation, and no part of its text?"""
        generation = self.generation
        return (
            generation.finish_reason is FinishReason.STOP
            and not self._rules.include_stop
            and self.completion_tokens == len(generation.output_token_ids)
            and generation.output_token_ids[-1] in generation.prompt.sampling.stop_token_ids
        )

    def _rest(self) -> str:
        text, stopped = self._stop.push(self._detokenizer.finish())
        return text if stopped else text + self._stop.flush()

    def _scores(self, start: int) -> list[ScoredToken] | None:
        """Of the tokens from number `start` on that have been taken in; None when nobody asked."""
        if self.generation.prompt.sampling.num_logprobs is None:
            return None
        stop = self.completion_tokens
        token_ids = self.generation.output_token_ids[start:stop]
        logprobs = self.generation.logprobs[start:stop]
        scores = [ScoredToken(*pair) for pair in zip(token_ids, logprobs, strict=True)]
        if scores and self._token_ended_it:
            scores[-1] = ScoredToken(token_ids[-1], logprobs[-1], in_text=False)
        return scores

    def _echo(self) -> Echo | None:
        prompt = self.lead.prompt
        if prompt.echo is None:
            return None
        if prompt.num_prompt_logprobs is None:
            return Echo(prompt.echo, None)
        logprobs = [None, *(self.lead.prompt_logprobs or ())]
        return Echo(prompt.echo, [ScoredToken(*pair) for pair in zip(prompt.token_ids, logprobs, strict=True)])


def usage_of(choices: Sequence[Choice]) -> Usage:
    """Counts over all choices of a response; the prompt of several choices counts once."""
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    prompt_tokens = cached_tokens = 0
    for lead in {id(choice.lead): choice.lead for choice in choices}.values():
        num_prompt_tokens = len(lead.prompt.token_ids)
        prompt_tokens += num_prompt_tokens
        cached_tokens += min(lead.num_cached_tokens or 0, num_prompt_tokens)
    return Usage(
        prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
    )
