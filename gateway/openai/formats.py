"""How the two endpoints spell answers: whole ones, and the chunks of streams."""

import time
import uuid
from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import UNSET, UnsetType

from ...core.errors import RequestError
from ...vocab.tokenizer import Tokenizer
from ..deltas import Content, Delta, Echo, FinishedChoice, Piece, Reasoning, ScoredToken
from .answers import (
    SSE_DONE,
    SSE_KEEP_ALIVE,
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FunctionCall,
    FunctionCallDelta,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    answer_of,
    encode_json,
    sse,
)
from .logprobs import CompletionSpeller, TokenSpeller, chat_logprobs
from .request import ParsedRequest


class AnswerFormat(Protocol):
    """How one endpoint spells answers. All results are encoded JSON (whole) or SSE events (the others).

    `usage`, for chunks: token counts so far, None when they are not asked for. `keep_alive`: what a quiet stream says.
    """

    keep_alive: bytes

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes: ...

    def first(self, index: int, usage: Usage) -> bytes:
        """What comes before the first text of a choice; may be empty."""
        ...

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        """What is new; its finish reason is told by `last`."""
        ...

    def last(self, delta: Delta, usage: Usage | None) -> bytes:
        """Why a choice has ended: of its last delta."""
        ...

    def end(self, usage: Usage) -> bytes:
        """What follows when all choices have ended."""
        ...

    def failed(self, error: RequestError) -> bytes:
        """The last event of a stream that could not be finished."""
        ...


_TEXT_MARK = uuid.uuid4().hex  # stands for the text in a template; nothing that a chunk says can be the same


class _Template:
    """A chunk of one choice but for its text: what does not change from token to token is encoded once."""

    def __init__(self, chunk: bytes):
        """`chunk` has `_TEXT_MARK` as its text."""
        self._head, self._tail = chunk.split(encode_json(_TEXT_MARK))

    def with_text(self, text: str) -> bytes:
        return self._head + encode_json(text) + self._tail


class _Base:
    """What all objects of one answer have in common."""

    keep_alive = SSE_KEEP_ALIVE

    def __init__(self, answer_id: str, model: str, request: ParsedRequest, tokenizer: Tokenizer):
        self._id = answer_id
        self._model = model
        self._created = int(time.time())
        self._tells_ids = request.return_token_ids
        self._tells_logprobs = request.tells_logprobs
        self._includes_usage = request.include_usage
        self._tells_usage = request.include_usage or request.continuous_usage
        self._always_counts = request.continuous_usage
        self._tier: str | UnsetType = UNSET if request.service_tier is None else request.service_tier
        self._templates: dict[int, _Template] = {}  # by choice
        self._speller = TokenSpeller(tokenizer, skip_special_tokens=request.rules.skip_special_tokens)

    def _text_alone(self, delta: Delta, usage: Usage | None) -> str | None:
        """The text of a chunk that says nothing else; None when this one does."""
        pieces = delta.pieces
        if self._tells_ids or self._tells_logprobs or delta.echo is not None or usage is not None or len(pieces) > 1:
            return None
        if not pieces:
            return ""
        piece = pieces[0]
        return piece.text if isinstance(piece, Content) else None

    def _ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        return token_ids if self._tells_ids else UNSET

    def _usage(self, usage: Usage | None) -> Usage | UnsetType | None:
        """`usage: null` when counts come later, as OpenAI's chunks have it."""
        return usage if self._tells_usage else UNSET

    def failed(self, error: RequestError) -> bytes:
        return sse(answer_of(error))


class CompletionFormat(_Base):
    """/v1/completions."""

    def __init__(self, answer_id: str, model: str, request: ParsedRequest, tokenizer: Tokenizer):
        super().__init__(answer_id, model, request, tokenizer)
        self._spellers: dict[int, CompletionSpeller] = {}  # of the choices of a stream

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        return encode_json(self._answer([self._whole_choice(choice) for choice in choices], usage))

    def first(self, index: int, usage: Usage) -> bytes:
        return b""

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        if (text := self._text_alone(delta, usage)) is not None:
            if (template := self._templates.get(delta.index)) is None:
                choice = CompletionChoice(delta.index, _TEXT_MARK, None, None)
                template = self._templates[delta.index] = _Template(sse(self._answer([choice], self._usage(usage))))
            return template.with_text(text)
        logprobs = None
        if self._tells_logprobs:
            if (speller := self._spellers.get(delta.index)) is None:
                speller = self._spellers[delta.index] = CompletionSpeller(self._speller)
            logprobs = speller.spell(delta.echo, delta.scores or ())
        text = _echoed(delta.echo) + "".join(piece.text for piece in delta.pieces if isinstance(piece, Content))
        choice = CompletionChoice(delta.index, text, logprobs, None, self._ids(delta.token_ids))
        return sse(self._answer([choice], self._usage(usage)))

    def last(self, delta: Delta, usage: Usage | None) -> bytes:
        choice = CompletionChoice(delta.index, "", None, delta.finish_reason)
        return sse(self._answer([choice], self._usage(usage)))

    def end(self, usage: Usage) -> bytes:
        return (sse(self._answer([], usage)) if self._includes_usage else b"") + SSE_DONE

    def _whole_choice(self, choice: FinishedChoice) -> CompletionChoice:
        logprobs: CompletionLogprobs | None = None
        if self._tells_logprobs:
            logprobs = CompletionSpeller(self._speller).spell(choice.echo, choice.scores or ())
        return CompletionChoice(
            choice.index,
            _echoed(choice.echo) + choice.text,
            logprobs,
            choice.finish_reason,
            self._ids(choice.token_ids),
            self._ids(choice.prompt_token_ids),
        )

    def _answer(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._id, "text_completion", self._created, self._model, choices, usage, self._tier)


class ChatFormat(_Base):
    """/v1/chat/completions."""

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        return encode_json(
            ChatCompletion(
                self._id,
                "chat.completion",
                self._created,
                self._model,
                [self._whole_choice(choice) for choice in choices],
                usage,
                self._tier,
                self._ids(choices[0].prompt_token_ids),
            )
        )

    def first(self, index: int, usage: Usage) -> bytes:
        choice = ChatChunkChoice(index, MessageDelta(role="assistant", content=""))
        return self._chunk(choice, usage if self._always_counts else None)

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        if (text := self._text_alone(delta, usage)) is not None:
            if (template := self._templates.get(delta.index)) is None:
                choice = ChatChunkChoice(delta.index, MessageDelta(content=_TEXT_MARK), None)
                template = self._templates[delta.index] = _Template(self._chunk(choice, usage))
            return template.with_text(text)
        choice = ChatChunkChoice(
            delta.index, _message_delta(delta.pieces), self._logprobs(delta.scores), None, self._ids(delta.token_ids)
        )
        return self._chunk(choice, usage)

    def last(self, delta: Delta, usage: Usage | None) -> bytes:
        return self._chunk(ChatChunkChoice(delta.index, MessageDelta(), None, delta.finish_reason), usage)

    def end(self, usage: Usage) -> bytes:
        return (sse(self._answer([], usage)) if self._includes_usage else b"") + SSE_DONE

    def _whole_choice(self, choice: FinishedChoice) -> ChatChoice:
        calls = [
            ToolCall(call.call_id or "", FunctionCall(call.name or "", call.arguments)) for call in choice.tool_calls
        ]
        message = AssistantMessage(
            content=(choice.text or None) if calls else choice.text,
            reasoning_content=UNSET if choice.reasoning is None else choice.reasoning,
            tool_calls=calls or UNSET,
        )
        return ChatChoice(
            choice.index, message, self._logprobs(choice.scores), choice.finish_reason, self._ids(choice.token_ids)
        )

    def _logprobs(self, scores: list[ScoredToken] | None) -> ChatLogprobs | None:
        return None if scores is None or not self._tells_logprobs else chat_logprobs(self._speller, scores)

    def _chunk(self, choice: ChatChunkChoice, usage: Usage | None) -> bytes:
        return sse(self._answer([choice], self._usage(usage)))

    def _answer(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            self._id, "chat.completion.chunk", self._created, self._model, choices, usage, self._tier
        )


def _echoed(echo: Echo | None) -> str:
    return "" if echo is None else echo.text


def _message_delta(pieces: list[Piece]) -> MessageDelta:
    """Pieces of one kind, and of one call, are joined; a delta without any (a token that is no text yet) has an empty
    content."""
    delta = MessageDelta()
    calls: dict[int, ToolCallDelta] = {}
    for piece in pieces or [Content("")]:
        if isinstance(piece, Content):
            delta.content = piece.text if delta.content is UNSET else delta.content + piece.text
        elif isinstance(piece, Reasoning):
            known = delta.reasoning_content
            delta.reasoning_content = piece.text if known is UNSET else known + piece.text
        elif piece.index in calls:  # only the first piece of a call has its id and name
            calls[piece.index].function.arguments += piece.arguments
        else:
            function = FunctionCallDelta(UNSET if piece.name is None else piece.name, piece.arguments)
            kind: Literal["function"] | UnsetType = UNSET if piece.call_id is None else "function"
            calls[piece.index] = ToolCallDelta(piece.index, piece.call_id or UNSET, kind, function)
    if calls:
        delta.tool_calls = list(calls.values())
    return delta
