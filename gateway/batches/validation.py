"""Validator: reads the input file of a batch line by line and enters its lines, or says what is wrong with which.

Bodies are not looked into beyond what concerns the batch: a wrong one costs its own line, when that runs.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from ...core.errors import RequestError
from .line_table import Line
from .objects import LineError

MAX_LINES = 50_000
MAX_CUSTOM_ID = 512
MAX_ERRORS = 100  # told of one file
_STEP_LINES, _STEP_BYTES = 256, 1024 * 1024  # other callers of the database wait this long for it
_LONGEST_COMPLAINT = 200
_FIELD = re.compile(r"missing required field `(\w+)`|at `\$\.(\w+)")


class _Line(msgspec.Struct):
    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    method: str
    url: str
    body: dict[str, Any]


_decode = msgspec.json.Decoder(_Line).decode


class Validator:
    """`add` enters a line and is False for a custom id that was there before; `check_model` is the parser's.

    `step` until `is_done`; then `errors` says what is wrong, or `num_lines` how many lines there are.
    """

    def __init__(
        self,
        path: Path,
        endpoint: str,
        longest_line: int,
        add: Callable[[Line], bool],
        check_model: Callable[[str | None], None],
    ):
        self._path = path
        self._position = 0  # bytes that have been read
        self._endpoint = endpoint
        self._longest_line = longest_line
        self._add = add
        self._check_model = check_model
        self._number = 0  # of the last line that was read
        self.num_lines = 0
        self.errors: list[LineError] = []
        self.is_done = False

    def step(self) -> None:
        """The next few lines."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            for _ in range(_STEP_LINES):
                if self.is_done or file.tell() - self._position > _STEP_BYTES:
                    break
                self._next_line(file)
            self._position = file.tell()

    def _next_line(self, file: BinaryIO) -> None:
        start = file.tell()
        text = file.readline(self._longest_line + 1)
        if not text:
            if not self.num_lines and not self.errors:
                self._complain("empty_file", "the file has no lines: write one request a line", None, None)
            self.is_done = True
            return
        self._number += 1
        if len(text) > self._longest_line:
            self._complain("line_too_long", f"a line has at most {self._longest_line:,} bytes", None)
            self.is_done = True  # where the next one begins is not worth reading on for
        elif text.strip():
            self._check(text, start)
        if len(self.errors) >= MAX_ERRORS:
            self.is_done = True

    def _check(self, text: bytes, start: int) -> None:
        self.num_lines += 1
        if self.num_lines > MAX_LINES:
            self._complain("too_many_tasks", f"a batch has at most {MAX_LINES:,} lines; send several batches", None)
            self.is_done = True
            return
        line = self._parsed(text)
        if line is None:
            return
        if line.method != "POST":
            self._complain("invalid_method", "method must be POST", "method")
        elif line.url != self._endpoint:
            self._complain("invalid_url", f"url must be {self._endpoint}, the endpoint of the batch", "url")
        elif line.body.get("stream"):
            self._complain("invalid_request", "a line of a batch cannot be streamed; leave stream out", "body.stream")
        elif self._is_model_right(line.body.get("model")) and not self._add(
            Line(self._number, line.custom_id, start, len(text))
        ):
            self._complain("duplicate_custom_id", "an earlier line has the same custom_id", "custom_id")

    def _parsed(self, text: bytes) -> _Line | None:
        try:
            return _decode(text)
        except msgspec.ValidationError as error:
            missing = "missing required field" in str(error)
            self._complain(
                "missing_required_parameter" if missing else "invalid_request", _bounded(error), _field_of(error)
            )
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._complain("invalid_json_line", f"this line is not valid JSON: {_bounded(error)}", None)
        return None

    def _is_model_right(self, model: Any) -> bool:
        if not isinstance(model, str):
            return True  # what is wrong with it is told when the line runs
        try:
            self._check_model(model)
        except RequestError as error:
            self._complain("model_not_found", str(error), "body.model")
            return False
        return True

    def _complain(self, code: str, message: str, param: str | None, line: int | None = -1) -> None:
        """`line` -1: the present one."""
        self.errors.append(LineError(code, message, self._number if line == -1 else line, param))


def read_body(path: Path, line: Line) -> bytes:
    """The JSON of a valid line's body."""
    with path.open("rb") as file:
        file.seek(line.start)
        return bytes(msgspec.json.decode(file.read(line.size), type=_Body).body)


class _Body(msgspec.Struct):
    body: msgspec.Raw


def _bounded(error: Exception) -> str:
    return str(error)[:_LONGEST_COMPLAINT]


def _field_of(error: msgspec.ValidationError) -> str | None:
    found = _FIELD.search(str(error))
    return found[1] or found[2] if found else None
