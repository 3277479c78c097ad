"""Many streams of one server at once, read with as little work as can be: bytes are kept, and looked at afterwards.

Read as fast as they come, or at a pace: then the server meets clients that are behind.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import msgspec

STALL_S = 30.0  # nothing at all from the server for so long: the run has failed
_READ_BYTES = 256 * 1024
_PACED_BUFFER_BYTES = 4096  # of the kernel, for a stream that is read at a pace


class Pace(msgspec.Struct, frozen=True):
    """What one stream takes: at most `num_bytes` in every `interval_s`."""

    num_bytes: int
    interval_s: float


class StreamRun(msgspec.Struct, frozen=True):
    """`texts`: of each stream its answer; `num_chunks`: events of all that carry text, empty or not."""

    seconds: float  # from the first request to the last byte
    num_chunks: int
    texts: list[str]


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Chunk).decode


class _Stream(asyncio.BufferedProtocol):
    """One request on one connection, which its server closes. `at_most`: bytes that are taken before `go_on` is called
    again; None: all, at once.
    """

    def __init__(self, ended: "asyncio.Future[None]", at_most: int | None):
        self._ended = ended
        self._is_paced = at_most is not None
        self._buffer = bytearray(at_most or _READ_BYTES)
        self._transport: asyncio.Transport | None = None
        self.parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.parts.append(bytes(memoryview(self._buffer)[:nbytes]))
        if self._is_paced and self._transport is not None:
            self._transport.pause_reading()

    def go_on(self) -> None:
        if self._transport is not None and not self._ended.done():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._ended.done():
            self._ended.set_result(None)


async def run_streams(port: int, body: bytes, num_streams: int, pace: Pace | None = None) -> StreamRun:
    """The same request on all. Raises ValueError for an answer that is no whole stream, TimeoutError for a server
    that says nothing any more.
    """
    loop = asyncio.get_running_loop()
    ends = [loop.create_future() for _ in range(num_streams)]
    connections = [await _connect(port, end, pace) for end in ends]
    streams = [stream for _, stream in connections]
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    request = f"{head}Content-Type: application/json\r\n\r\n".encode() + body
    started = time.perf_counter()
    for transport, _ in connections:
        transport.write(request)
    async with _at_pace(streams, pace):
        await _until_all_end(ends, streams)
    seconds = time.perf_counter() - started
    answers = [_answer(b"".join(stream.parts)) for stream in streams]
    return StreamRun(seconds, sum(num_chunks for num_chunks, _ in answers), [text for _, text in answers])


async def _connect(port: int, end: "asyncio.Future[None]", pace: Pace | None) -> tuple[asyncio.Transport, _Stream]:
    connection = socket.socket()
    connection.setblocking(False)
    loop, at_most = asyncio.get_running_loop(), None
    if pace is not None:  # the kernel must not read on instead
        at_most = pace.num_bytes
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PACED_BUFFER_BYTES)
    await loop.sock_connect(connection, ("127.0.0.1", port))
    return await loop.create_connection(partial(_Stream, end, at_most), sock=connection)


@asynccontextmanager
async def _at_pace(streams: Sequence[_Stream], pace: Pace | None) -> AsyncIterator[None]:
    """Lets all streams go on once in every interval."""
    if pace is None:
        yield
        return

    async def keep(pace: Pace) -> None:
        while True:
            await asyncio.sleep(pace.interval_s)
            for stream in streams:
                stream.go_on()

    keeping = asyncio.create_task(keep(pace))
    try:
        yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


async def _until_all_end(ends: "list[asyncio.Future[None]]", streams: list[_Stream]) -> None:
    num_parts = -1
    while True:
        _, running = await asyncio.wait(ends, timeout=STALL_S)
        if not running:
            return
        before, num_parts = num_parts, sum(len(stream.parts) for stream in streams)
        if num_parts == before:
            raise TimeoutError(f"{len(running)} streams stand still: nothing came for {STALL_S:g} s")


def _answer(response: bytes) -> tuple[int, str]:
    """Number of chunks and text of one response."""
    head, _, rest = response.partition(b"\r\n\r\n")
    status = head.partition(b"\r\n")[0]
    if b" 200 " not in status:
        raise ValueError(f"the server answered {status.decode(errors='replace')!r}: {rest[:300]!r}")
    events = [event for event in _dechunked(rest).split(b"\n\n") if event.startswith(b"data: ")]
    if not events or events[-1] != b"data: [DONE]":
        raise ValueError(f"a stream was cut off: {rest[-300:]!r}")
    choices = [choice for event in events[:-1] for choice in _decode(event[len(b"data: ") :]).choices]
    told = [choice.text for choice in choices if choice.finish_reason is None]
    return len(told), "".join(told)


def _dechunked(body: bytes) -> bytes:
    """The content of a body in HTTP's chunked coding."""
    parts: list[bytes] = []
    position = 0
    while True:
        end = body.index(b"\r\n", position)
        size = int(body[position:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        position = end + 2 + size + 2
