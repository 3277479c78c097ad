"""How /v1/messages spells an answer: whole, and as a stream of events."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ...core.errors import RequestError
from ...core.request import FinishReason
from ..deltas import Content, Delta, FinishedChoice, Piece, Reasoning, ToolCallPiece
from ..openai.answers import Usage, encode_json
from .answers import (
    Block,
    EventDelta,
    Message,
    MessageUsage,
    StopReason,
    StreamEvent,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    anthropic_error,
    sse_event,
)

_PING = sse_event(StreamEvent("ping"))
_STOP_REASONS: dict[str, StopReason] = {FinishReason.LENGTH: "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat:
    """An AnswerFormat for one answer."""

    keep_alive = _PING

    def __init__(self, message_id: str, model: str):
        self._id = message_id
        self._model = model
        self._kind: tuple[type[Piece], int] | None = None  # of the block that is open
        self._num_blocks = 0
        self._stop_reason: StopReason = "end_turn"
        self._stop_sequence: str | None = None

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        (choice,) = choices
        self._note_end(choice.finish_reason, choice.stop)
        blocks = _whole_blocks(choice.pieces)
        return encode_json(self._message(blocks, self._stop_reason, self._stop_sequence, _usage(usage)))

    def first(self, index: int, usage: Usage) -> bytes:
        counts = _usage(usage)
        return sse_event(StreamEvent("message_start", message=self._message([], None, None, counts))) + _PING

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        return b"".join(self._piece(piece) for piece in delta.pieces)

    def last(self, delta: Delta, usage: Usage | None) -> bytes:
        assert delta.finish_reason is not None
        self._note_end(delta.finish_reason, delta.stop)
        return self._close()

    def end(self, usage: Usage) -> bytes:
        delta = EventDelta(stop_reason=self._stop_reason, stop_sequence=self._stop_sequence)
        ended = StreamEvent("message_delta", delta=delta, usage=_usage(usage))
        return sse_event(ended) + sse_event(StreamEvent("message_stop"))

    def failed(self, error: RequestError) -> bytes:
        return sse_event(anthropic_error(error))

    def _note_end(self, finish_reason: str, stop: str | None) -> None:
        self._stop_reason = "end_turn" if stop is None else "stop_sequence"
        self._stop_reason = _STOP_REASONS.get(finish_reason, self._stop_reason)
        self._stop_sequence = stop if self._stop_reason == "stop_sequence" else None

    def _piece(self, piece: Piece) -> bytes:
        kind = _kind(piece)
        begun = b""
        if kind != self._kind:
            begun = self._close()
            self._kind = kind
            begun += sse_event(StreamEvent("content_block_start", index=self._num_blocks, content_block=_empty(piece)))
        delta = _delta(piece)
        if delta is None:
            return begun
        return begun + sse_event(StreamEvent("content_block_delta", index=self._num_blocks, delta=delta))

    def _close(self) -> bytes:
        """The end of the open block, if there is one."""
        if self._kind is None:
            return b""
        self._kind = None
        self._num_blocks += 1
        return sse_event(StreamEvent("content_block_stop", index=self._num_blocks - 1))

    def _message(
        self, blocks: list[Block], stop_reason: StopReason | None, stop: str | None, usage: MessageUsage
    ) -> Message:
        return Message(self._id, self._model, blocks, stop_reason, stop, usage)


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _kind(piece: Piece) -> tuple[type[Piece], int]:
    """Pieces of one kind that follow each other are one block."""
    return type(piece), piece.index if isinstance(piece, ToolCallPiece) else 0


def _empty(piece: Piece) -> Block:
    match piece:
        case Content():
            return TextBlock("")
        case Reasoning():
            return ThinkingBlock("")
        case ToolCallPiece():
            return ToolUseBlock(piece.call_id or "", piece.name or "", {})


def _delta(piece: Piece) -> EventDelta | None:
    match piece:
        case Content():
            return EventDelta("text_delta", text=piece.text)
        case Reasoning():
            return EventDelta("thinking_delta", thinking=piece.text)
        case ToolCallPiece():
            return EventDelta("input_json_delta", partial_json=piece.arguments) if piece.arguments else None


def _whole_blocks(pieces: Sequence[Piece]) -> list[Block]:
    groups: list[list[Piece]] = []
    for piece in pieces:
        if not groups or _kind(groups[-1][0]) != _kind(piece):
            groups.append([])
        groups[-1].append(piece)
    return [_whole_block(group) for group in groups]


def _whole_block(pieces: list[Piece]) -> Block:
    """`pieces` are of one kind."""
    first = pieces[0]
    if isinstance(first, ToolCallPiece):
        arguments = "".join(piece.arguments for piece in pieces if isinstance(piece, ToolCallPiece))
        return ToolUseBlock(first.call_id or "", first.name or "", _input(arguments))
    text = "".join(piece.text for piece in pieces if isinstance(piece, Content | Reasoning))
    return TextBlock(text) if isinstance(first, Content) else ThinkingBlock(text)


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; of those that max_tokens cut off there is none."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
