"""Log-probabilities as the two endpoints spell them, with the bytes that each token really adds to the text.

A token may hold a part of a character only. As text it is then spelled `bytes:\\xf0\\x9f`, as OpenAI does, never with
a replacement character, which would stand for other bytes.
"""

from collections.abc import Sequence

from ...core.request import TokenLogprobs
from ...vocab.detokenizer import Detokenizer
from ...vocab.tokenizer import Tokenizer
from ..deltas import Echo, ScoredToken
from .answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob


class TokenSpeller:
    """Texts and bytes of single tokens of one answer. `skip_special_tokens`: its text has no special tokens."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens

    def text(self, token_id: int) -> str:
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def added_bytes(self, token_id: int) -> list[int]:
        """What the token adds to the text: nothing when it is special and skipped."""
        if self.skip_special_tokens and self.tokenizer.is_special(token_id):
            return []
        return list(self.tokenizer.token_bytes(token_id))


def chat_logprobs(speller: TokenSpeller, scores: Sequence[ScoredToken]) -> ChatLogprobs:
    """Of tokens of an answer. Every generated token has an entry; that of an end token has no bytes."""
    return ChatLogprobs([_chat_entry(speller, score, score.logprobs) for score in scores if score.logprobs is not None])


def _chat_entry(speller: TokenSpeller, score: ScoredToken, logprobs: TokenLogprobs) -> TokenLogprob:
    top = [
        TopLogprob(speller.text(token_id), logprob, speller.added_bytes(token_id)) for token_id, logprob in logprobs.top
    ]
    added = speller.added_bytes(score.token_id) if score.in_text else []
    return TokenLogprob(speller.text(score.token_id), logprobs.logprob, added, top)


class CompletionSpeller:
    """The four lists of one choice, piece by piece: knows where in the text the next token begins."""

    def __init__(self, speller: TokenSpeller):
        self._speller = speller
        self._offset = 0
        self._detokenizer = self._new_detokenizer()

    def spell(self, echo: Echo | None, scores: Sequence[ScoredToken]) -> CompletionLogprobs:
        """The next tokens of the choice; `echo` comes with the first call only, if at all."""
        lists = CompletionLogprobs([], [], [], [])
        if echo is not None:
            for score in echo.scores or ():
                self._add(lists, score, len(echo.text))
            self._offset, self._detokenizer = len(echo.text), self._new_detokenizer()
        for score in scores:
            self._add(lists, score, None)
        return lists

    def _add(self, lists: CompletionLogprobs, score: ScoredToken, last_offset: int | None) -> None:
        text = self._speller.text(score.token_id)
        lists.tokens.append(text)
        lists.text_offset.append(self._offset if last_offset is None else min(self._offset, last_offset))
        if score.in_text:
            self._offset += len(self._detokenizer.push([score.token_id]))
        lists.token_logprobs.append(None if score.logprobs is None else score.logprobs.logprob)
        lists.top_logprobs.append(None if score.logprobs is None else self._top(text, score.logprobs))

    def _top(self, text: str, logprobs: TokenLogprobs) -> dict[str, float]:
        """Best first. Of two tokens with one text (which happens) the likelier one stays."""
        top: dict[str, float] = {}
        for token_id, logprob in logprobs.top:
            top.setdefault(self._speller.text(token_id), logprob)
        top.setdefault(text, logprobs.logprob)
        return top

    def _new_detokenizer(self) -> Detokenizer:
        return Detokenizer(self._speller.tokenizer, self._speller.skip_special_tokens)
