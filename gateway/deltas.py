"""What is new of one choice, and a whole choice: between the tokens that come and the JSON that goes out.

Text becomes *pieces*: what the user reads, what the model thought before it, calls of tools. Which text is which is
decided by a PieceParser, one for each choice.
"""

from typing import Protocol

import msgspec

from ..core.request import TokenLogprobs


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text the model thought before it answered."""

    text: str


class ToolCallPiece(msgspec.Struct, frozen=True, gc=False):
    """More of call number `index`: first its id and name, then pieces of its arguments (JSON as text)."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


Piece = Content | Reasoning | ToolCallPiece


class PieceParser(Protocol):
    """Reads the growing text of one choice; the pieces do not depend on how the text was cut."""

    def push(self, text: str) -> list[Piece]:
        """More text; the pieces that are certain now."""
        ...

    def finish(self) -> list[Piece]:
        """No more text comes: what was held back."""
        ...


class PlainText:
    """All text is content."""

    def push(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class ScoredToken(msgspec.Struct, frozen=True, gc=False):
    """A token with its log-probabilities (None: the first of a prompt). `in_text`: it is not what ended the text."""

    token_id: int
    logprobs: TokenLogprobs | None
    in_text: bool = True


class Echo(msgspec.Struct, frozen=True):
    """The prompt, where an answer begins with it; `scores` when log-probabilities are asked for."""

    text: str
    scores: list[ScoredToken] | None


class Delta(msgspec.Struct, frozen=True):
    """What is new of one choice. `stop`: the stop string that ended it; `stopped_early`: its worker does not know."""

    index: int
    pieces: list[Piece]
    token_ids: list[int]
    finish_reason: str | None = None
    scores: list[ScoredToken] | None = None
    echo: Echo | None = None
    stopped_early: bool = False
    stop: str | None = None


class FinishedChoice(msgspec.Struct, frozen=True):
    """One whole choice. `stop`: the stop string that ended it."""

    index: int
    pieces: list[Piece]
    token_ids: list[int]
    finish_reason: str
    prompt_token_ids: list[int]
    scores: list[ScoredToken] | None = None
    echo: Echo | None = None
    stop: str | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Content))

    @property
    def reasoning(self) -> str | None:
        """None when there is none."""
        texts = [piece.text for piece in self.pieces if isinstance(piece, Reasoning)]
        return "".join(texts) if texts else None

    @property
    def tool_calls(self) -> list[ToolCallPiece]:
        """Every call in one piece."""
        calls: dict[int, ToolCallPiece] = {}
        for piece in self.pieces:
            if isinstance(piece, ToolCallPiece):
                known = calls.get(piece.index)
                calls[piece.index] = piece if known is None else _joined(known, piece)
        return list(calls.values())


def _joined(call: ToolCallPiece, more: ToolCallPiece) -> ToolCallPiece:
    return ToolCallPiece(call.index, call.call_id, call.name, call.arguments + more.arguments)
