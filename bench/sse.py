"""Server-sent events, read incrementally: bytes in, the data of complete events out. No sockets.

Source: WHATWG HTML, section "Server-sent events". Only the `data` field matters to an OpenAI stream; comments (the
keep-alives of a long prefill) and other fields are dropped.
"""

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
MAX_PENDING_BYTES = 16 << 20  # one event; beyond it the server is not speaking this protocol


class SSEParser:
    """Splits a byte stream into events. The result does not depend on where the stream was cut into pieces."""

    def __init__(self) -> None:
        self._partial_line = b""
        self._data: list[bytes] = []
        self._after_cr = False
        self._pending_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that `piece` completes; several `data` lines are joined by a newline.

        Raises ValueError when one event is larger than MAX_PENDING_BYTES.
        """
        if self._after_cr and piece:  # CR LF is one line end even when it is cut in the middle
            piece, self._after_cr = piece.removeprefix(b"\n"), False
        if not piece:
            return []
        self._after_cr = piece.endswith(b"\r")
        self._pending_bytes += len(piece)
        *lines, self._partial_line = _LINE_END.split(self._partial_line + piece)
        events = []
        for line in lines:
            if line:
                self._take_field(line)
                continue
            if self._data:
                events.append(b"\n".join(self._data))
                self._data = []
            self._pending_bytes = len(self._partial_line)
        if self._pending_bytes > MAX_PENDING_BYTES:
            raise ValueError(f"an event of the stream is larger than {MAX_PENDING_BYTES} bytes")
        return events

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
