"""JsonScanner: reads one JSON value character by character; says where it ends, or where it is no JSON. Pure."""

import re

import msgspec

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = ("true", "false", "null")
_SPACE = " \n\r\t"
_HEX = "0123456789abcdefABCDEF"


class Member(msgspec.Struct):
    """A key of the outermost object, quoted as it stood there, and where its value is; `end` None: not complete."""

    key: str
    start: int
    end: int | None = None


class JsonScanner:
    """`push` one character after the other until it answers False or `is_complete`.

    `depth` counts open objects and arrays; `members` and `num_ended` (of them) are those of the outermost object. A
    number that is the whole value ends only with what follows it, which is not a part of it.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.is_complete = False
        self.members: list[Member] = []
        self.num_ended = 0
        self._position = -1  # of the character that is looked at
        self._open: list[str] = []
        self._expects = "value"
        self._word = ""  # of a key, number or literal that has begun
        self._escape = 0  # characters of an escape that are still to come; -1: the one that says which

    def push(self, character: str) -> bool:
        """False: this character cannot come here. Do not go on then."""
        self._position += 1
        match self._expects:
            case "key_text" | "text":
                return self._in_text(character)
            case "number" if character in "0123456789+-.eE":
                self._word += character
                return True
            case "number":
                if _NUMBER.fullmatch(self._word) is None:
                    return False
                self._value_ended(self._position)
                return not self.is_complete and self._between(character)
            case "literal":
                return self._in_literal(character)
            case _:
                return self._between(character)

    def _between(self, character: str) -> bool:
        return character in _SPACE or self._structure(character)

    def _structure(self, character: str) -> bool:
        match self._expects, character:
            case ("first_item", "]") | ("first_key", "}"):
                self._close()
            case (("value" | "first_item"), _):
                return self._begin_value(character)
            case (("first_key" | "key"), '"'):
                self._expects, self._word = "key_text", character
            case "colon", ":":
                self._expects = "value"
            case "more", ",":
                self._expects = "key" if self._open[-1] == "}" else "value"
            case "more", _ if character == self._open[-1]:
                self._close()
            case _:
                return False
        return True

    def _begin_value(self, character: str) -> bool:
        if character not in '{["-0123456789tfn':
            return False
        if self._open == ["}"]:
            self.members.append(Member(self._word, self._position))
        if character in "{[":
            self._open.append("}" if character == "{" else "]")
            self.depth += 1
            self._expects = "first_key" if character == "{" else "first_item"
        elif character == '"':
            self._expects = "text"
        else:
            self._expects, self._word = ("literal" if character in "tfn" else "number"), character
        return True

    def _close(self) -> None:
        self._open.pop()
        self.depth -= 1
        self._value_ended(self._position + 1)

    def _value_ended(self, end: int) -> None:
        self._expects = "more"
        self.is_complete = not self._open
        if self._open == ["}"]:
            self.members[-1].end = end
            self.num_ended += 1

    def _in_text(self, character: str) -> bool:
        is_key = self._expects == "key_text"
        if is_key:
            self._word += character
        if self._escape == -1:
            self._escape = 4 if character == "u" else 0
            return character in '"\\/bfnrtu'
        if self._escape > 0:
            self._escape -= 1
            return character in _HEX
        if character == "\\":
            self._escape = -1
        elif character == '"':
            if is_key:
                self._expects = "colon"
            else:
                self._value_ended(self._position + 1)
        return character >= " "

    def _in_literal(self, character: str) -> bool:
        self._word += character
        if self._word in _LITERALS:
            self._value_ended(self._position + 1)
            return True
        return any(literal.startswith(self._word) for literal in _LITERALS)
