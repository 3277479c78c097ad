"""Output: the items of one answer as they grow, and the events that tell of it. Pure.

An item ends where a piece of another kind begins. A whole answer is the same as the sum of its events, because it is
made by the same code.
"""

from typing import Protocol

from ..deltas import Content, Piece, Reasoning, ToolCallPiece
from ..openai.answers import TokenLogprob
from .answers import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    Part,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
)


class _Writer(Protocol):
    """One item that is being written. `begin` and `end` come between the events for the item as such."""

    def item(self, status: ItemStatus) -> OutputItem: ...

    def takes(self, piece: Piece) -> bool: ...

    def begin(self) -> list[ResponseEvent]: ...

    def add(self, piece: Piece, logprobs: list[TokenLogprob]) -> list[ResponseEvent]: ...

    def end(self, logprobs: list[TokenLogprob]) -> list[ResponseEvent]: ...


class Output:
    """`item_ids` end in `suffix`, which no other answer has."""

    def __init__(self, suffix: str):
        self.items: list[OutputItem] = []
        self._suffix = suffix
        self._writer: _Writer | None = None
        self._logprobs: list[TokenLogprob] = []  # that no event has told yet

    def push(self, pieces: list[Piece], logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        """Log-probabilities go with the next text of the message; those of other items are not told."""
        self._logprobs += logprobs
        events = []
        for piece in pieces:
            if self._writer is None or not self._writer.takes(piece):
                events += [*self._end("completed"), *self._begin(piece)]
            assert self._writer is not None
            told: list[TokenLogprob] = []
            if isinstance(piece, Content):
                told, self._logprobs = self._logprobs, []
            events += self._writer.add(piece, told)
        return events

    def finish(self, status: ItemStatus) -> list[ResponseEvent]:
        """`status`: of the last item. An answer without any text is an empty message."""
        events = []
        if self._writer is None:
            events = self._begin(Content(""))
        return events + self._end(status)

    def _begin(self, piece: Piece) -> list[ResponseEvent]:
        index = len(self.items)
        suffix = f"{self._suffix}_{index}"
        match piece:
            case Content():
                self._writer = _MessageWriter(f"msg_{suffix}", index)
            case Reasoning():
                self._writer = _ReasoningWriter(f"rs_{suffix}", index)
            case ToolCallPiece():
                self._writer = _CallWriter(f"fc_{suffix}", index, piece)
        item = self._writer.item("in_progress")
        added = ResponseEvent(type="response.output_item.added", output_index=index, item=item)
        return [added, *self._writer.begin()]

    def _end(self, status: ItemStatus) -> list[ResponseEvent]:
        if self._writer is None:
            return []
        events = self._writer.end(self._logprobs)
        item = self._writer.item(status)
        done = ResponseEvent(type="response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._writer, self._logprobs = None, []
        return [*events, done]


class _TextWriter:
    """An item with one part of text. `kind`: what its events are called."""

    def __init__(self, item_id: str, index: int, kind: str):
        self._id = item_id
        self._index = index
        self._kind = kind
        self._text = ""
        self._is_begun = False

    def part(self) -> Part:
        raise NotImplementedError

    def begin(self) -> list[ResponseEvent]:
        self._is_begun = True
        return [self._event("response.content_part.added", part=self.part())]

    def end(self, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        done = self._event(f"{self._kind}.done", text=self._text)
        return [done, self._event("response.content_part.done", part=self.part())]

    def _event(self, type: str, part: Part | None = None, text: str | None = None) -> ResponseEvent:
        event = ResponseEvent(type=type, item_id=self._id, output_index=self._index, content_index=0)
        if part is not None:
            event.part = part
        if text is not None:
            event.text = text
        return event


class _MessageWriter(_TextWriter):
    def __init__(self, item_id: str, index: int):
        super().__init__(item_id, index, "response.output_text")
        self._logprobs: list[TokenLogprob] = []

    def part(self) -> OutputText:
        return OutputText(self._text, list(self._logprobs))

    def item(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(self._id, status, [self.part()] if self._is_begun else [])

    def takes(self, piece: Piece) -> bool:
        return isinstance(piece, Content)

    def add(self, piece: Piece, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        assert isinstance(piece, Content)
        self._text += piece.text
        self._logprobs += logprobs
        event = self._event(f"{self._kind}.delta")
        event.delta, event.logprobs = piece.text, logprobs
        return [event]

    def end(self, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        self._logprobs += logprobs  # of what ended it, which has no text
        events = super().end(logprobs)
        events[0].logprobs = list(self._logprobs)
        return events


class _ReasoningWriter(_TextWriter):
    def __init__(self, item_id: str, index: int):
        super().__init__(item_id, index, "response.reasoning_text")

    def part(self) -> ReasoningText:
        return ReasoningText(self._text)

    def item(self, status: ItemStatus) -> ReasoningItem:
        return ReasoningItem(self._id, status, [self.part()] if self._is_begun else [])

    def takes(self, piece: Piece) -> bool:
        return isinstance(piece, Reasoning)

    def add(self, piece: Piece, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        assert isinstance(piece, Reasoning)
        self._text += piece.text
        event = self._event(f"{self._kind}.delta")
        event.delta = piece.text
        return [event]


class _CallWriter:
    """One call; its first piece has the id and the name."""

    def __init__(self, item_id: str, index: int, first: ToolCallPiece):
        self._id = item_id
        self._index = index
        self._number = first.index
        self._call_id = first.call_id or ""
        self._name = first.name or ""
        self._arguments = ""

    def item(self, status: ItemStatus) -> FunctionCallItem:
        return FunctionCallItem(self._id, status, self._call_id, self._name, self._arguments)

    def takes(self, piece: Piece) -> bool:
        return isinstance(piece, ToolCallPiece) and piece.index == self._number

    def begin(self) -> list[ResponseEvent]:
        return []

    def add(self, piece: Piece, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        assert isinstance(piece, ToolCallPiece)
        self._arguments += piece.arguments
        return [self._event("delta", delta=piece.arguments)] if piece.arguments else []

    def end(self, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        event = self._event("done")
        event.name, event.arguments = self._name, self._arguments
        return [event]

    def _event(self, kind: str, delta: str | None = None) -> ResponseEvent:
        event = ResponseEvent(
            type=f"response.function_call_arguments.{kind}", item_id=self._id, output_index=self._index
        )
        if delta is not None:
            event.delta = delta
        return event
