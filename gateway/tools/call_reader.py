"""CallReader: reads one tool call, a JSON object with its name and arguments, as its text grows. Pure."""

import secrets
import string
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any

import msgspec

from ..deltas import Piece, ToolCallPiece
from .json_scanner import JsonScanner, Member

ARGUMENT_KEYS = ("arguments", "parameters")  # Hermes and Qwen, Llama 3

# Arguments of a call that no grammar guarantees are told when so much of them is good JSON, or all: what is told cannot
# be taken back, and short calls are where models go wrong.
HELD_CHARACTERS = 512

_ALPHABET = string.ascii_letters + string.digits


def new_call_id() -> str:
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))


class CallRules(msgspec.Struct, frozen=True):
    """`names`: tools that may be called. `held`: characters of arguments that must be good before any are told."""

    names: Collection[str]
    held: int = HELD_CHARACTERS
    new_id: Callable[[], str] = new_call_id


class CallState(StrEnum):
    READING = "reading"
    DONE = "done"  # the object is complete, or broke after its arguments
    FAILED = "failed"  # it is no call, or none that may be told


class CallReader:
    """`push` text while `state` is READING. `raw` is all that was taken in; when the state is FAILED nothing of it has
    been told.
    """

    def __init__(self, index: int, rules: CallRules):
        self._index = index
        self._rules = rules
        self._scanner = JsonScanner()
        self._characters: list[str] = []
        self._num_read = 0  # members of the object
        self._name: str | None = None
        self._is_unknown = False  # it has another name than a tool
        self._told: int | None = None  # how far the arguments have been told; None: nothing has
        self.state = CallState.READING

    @property
    def raw(self) -> str:
        return "".join(self._characters)

    def push(self, text: str) -> int:
        """How many characters were taken in; the rest, if any, is no part of the call."""
        for count, character in enumerate(text):
            if not self._push(character):
                self.finish()
                return count
            if self._scanner.is_complete or self._is_unknown:
                self.finish()
                return count + 1
        return len(text)

    def finish(self) -> None:
        """No more text comes: it is a call if all its arguments are here, or some have been told already."""
        if self.state is CallState.READING:
            is_call = self._told is not None or self._is_long_enough() or self._whole_arguments() is not None
            self.state = CallState.DONE if is_call else CallState.FAILED

    def take(self) -> list[Piece]:
        """The pieces that are certain now and were not before."""
        if self._told is None and not self._is_long_enough():
            if self.state is not CallState.DONE:
                return []
            arguments = self._whole_arguments()
            assert arguments is not None
            self._told = len(self._characters)
            return [self._announced(), ToolCallPiece(self._index, arguments=arguments)]
        pieces: list[Piece] = []
        member = self._arguments()
        assert member is not None
        if self._told is None:
            self._told = member.start
            pieces.append(self._announced())
        stop = len(self._characters) if member.end is None else member.end
        if stop > self._told:
            pieces.append(ToolCallPiece(self._index, arguments="".join(self._characters[self._told : stop])))
            self._told = stop
        return pieces

    def _push(self, character: str) -> bool:
        if self._scanner.depth == 0 and character != "{" and not character.isspace():
            return False
        if not self._scanner.push(character):
            return False
        self._characters.append(character)
        if self._scanner.num_ended == self._num_read:
            return True
        self._num_read += 1
        member = self._scanner.members[self._num_read - 1]
        if self._name is not None or _decoded(member.key) != "name":
            return True
        name = self._value(member)
        self._is_unknown = not isinstance(name, str) or name not in self._rules.names
        self._name = None if self._is_unknown else name
        return True

    def _announced(self) -> ToolCallPiece:
        return ToolCallPiece(self._index, self._rules.new_id(), self._name)

    def _arguments(self) -> Member | None:
        """The object with the arguments, as soon as it has begun."""
        for member in self._scanner.members:
            if _decoded(member.key) in ARGUMENT_KEYS and self._characters[member.start] == "{":
                return member
        return None

    def _is_long_enough(self) -> bool:
        """Whether the arguments can be told as they stood: they are complete, or many are good."""
        member = self._arguments() if self._name is not None else None
        if member is None:
            return False
        return member.end is not None or len(self._characters) - member.start >= max(self._rules.held, 1)

    def _whole_arguments(self) -> str | None:
        """Arguments that were left out, or came as a text; None when there are none that could be told."""
        if self._name is None or not self._scanner.is_complete:
            return None
        for member in self._scanner.members:
            if _decoded(member.key) in ARGUMENT_KEYS:
                value = self._value(member)
                is_object_as_text = isinstance(value, str) and isinstance(_decoded(value), dict)
                return "{}" if value is None else str(value) if is_object_as_text else None
        return "{}"

    def _value(self, member: Member) -> Any:
        return _decoded("".join(self._characters[member.start : member.end]))


def _decoded(text: str) -> Any:
    """None for what only looks like JSON, such as half of a surrogate pair."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
