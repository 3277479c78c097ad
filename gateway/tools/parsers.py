"""CallParser: finds calls of tools in one growing answer, in whatever chunks it comes. Pure.

Two ways of calling are known (vocab/tool_format.py): marks around each call, and a bare JSON object as the whole
answer. White space around calls is dropped. What is no call of a known tool stays in the text as it stood there.
"""

from collections.abc import Callable

from ...vocab.tool_format import ToolFormat
from ..deltas import Content, Piece
from .call_reader import CallReader, CallRules, CallState


class CallParser:
    """A PieceParser. `most_calls`: what comes after so many is text, whatever it is; None: no bound."""

    def __init__(self, format: ToolFormat, rules: CallRules, most_calls: int | None = None):
        self._format = format
        self._rules = rules
        self._most_calls = most_calls
        self._num_calls = 0
        self._held = ""  # text whose meaning is not decided yet
        self._mark = ""  # that began the call which is being read
        self._reader: CallReader | None = None
        self._is_closed = False  # the last call's end mark has come
        # Takes text, tells what is certain, and returns what another state must look at.
        self._state: Callable[[str, list[Piece]], str] = self._at_start if format.is_bare else self._in_text

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            text = self._state(text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._reader is not None:
            self._reader.finish()
            self._end_call(self._reader, pieces)
        self._tell_held(pieces)
        return pieces

    def _at_start(self, text: str, pieces: list[Piece]) -> str:
        seen = self._held + text
        bare = seen.lstrip()
        self._held = ""
        if not bare:
            self._held = seen
            return ""
        if bare[0] != "{":
            self._state = self._in_text
            return seen
        self._held = seen[: len(seen) - len(bare)]
        self._begin_call("")
        return bare

    def _in_text(self, text: str, pieces: list[Piece]) -> str:
        if self._num_calls == self._most_calls:
            _tell(text, pieces)
            return ""
        mark = self._format.begin
        seen = self._held + text
        before, found, after = seen.partition(mark)
        if not found:
            before = seen[: len(seen) - _overlap(seen, mark)]
        certain = before.rstrip()  # white space may stand before a call
        _tell(certain, pieces)
        if found:
            self._held = before[len(certain) :]
            self._begin_call(mark)
        else:
            self._held = seen[len(certain) :]
        return after

    def _in_call(self, text: str, pieces: list[Piece]) -> str:
        reader = self._reader
        assert reader is not None
        rest = text[reader.push(text) :]
        if reader.state is CallState.READING:
            pieces += reader.take()
        else:
            self._end_call(reader, pieces)
        return rest

    def _behind_call(self, text: str, pieces: list[Piece]) -> str:
        mark = self._format.end
        bare = (self._held + text).lstrip()
        self._held = ""
        if not self._is_closed and bare.startswith(mark):
            self._is_closed = True
            return bare[len(mark) :]
        if not bare or (not self._is_closed and mark.startswith(bare)):
            self._held = bare
        elif self._format.is_bare and bare[0] == "{" and self._num_calls != self._most_calls:
            self._begin_call("")
            return bare
        else:
            self._state = self._in_text
            return bare
        return ""

    def _begin_call(self, mark: str) -> None:
        self._mark = mark
        self._reader = CallReader(self._num_calls, self._rules)
        self._state = self._in_call

    def _end_call(self, reader: CallReader, pieces: list[Piece]) -> None:
        self._reader = None
        if reader.state is CallState.DONE:
            pieces += reader.take()
            self._num_calls += 1
            self._held, self._is_closed = "", False
            self._state = self._behind_call
        else:
            self._tell_held(pieces)
            _tell(self._mark + reader.raw, pieces)
            self._state = self._in_text

    def _tell_held(self, pieces: list[Piece]) -> None:
        _tell(self._held, pieces)
        self._held = ""


def _tell(text: str, pieces: list[Piece]) -> None:
    if text:
        pieces.append(Content(text))


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
