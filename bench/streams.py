"""Many streams of one server at once, read with as little work as can be: bytes are kept, and looked at afterwards."""

import asyncio
import time
from functools import partial

import msgspec

STALL_S = 30.0  # nothing at all from the server for so long: the run has failed


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


class _Stream(asyncio.Protocol):
    """One request on one connection, which its server closes."""

    def __init__(self, ended: "asyncio.Future[None]"):
        self._ended = ended
        self.parts: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


async def run_streams(port: int, body: bytes, num_streams: int) -> StreamRun:
    """The same request on all. Raises ValueError for an answer that is no whole stream, TimeoutError for a server
    that says nothing any more.
    """
    loop = asyncio.get_running_loop()
    ends = [loop.create_future() for _ in range(num_streams)]
    connections = [await loop.create_connection(partial(_Stream, end), "127.0.0.1", port) for end in ends]
    streams = [stream for _, stream in connections]
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    request = f"{head}Content-Type: application/json\r\n\r\n".encode() + body
    started = time.perf_counter()
    for transport, _ in connections:
        transport.write(request)
    await _until_all_end(ends, streams)
    seconds = time.perf_counter() - started
    answers = [_answer(b"".join(stream.parts)) for stream in streams]
    return StreamRun(seconds, sum(num_chunks for num_chunks, _ in answers), [text for _, text in answers])


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
