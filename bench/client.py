"""One streamed request to an OpenAI-compatible server, and what is learnt from it. HTTP only."""

import asyncio
import time
from typing import Any

import aiohttp
import msgspec

from ..core.credentials import api_key_headers
from .options import Endpoint
from .record import RequestRecord
from .sse import SSEParser
from .stream import RequestFailed, StreamReader, error_text

_PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_BYTES = 65536


class Conversation:
    """What has been said in one session; builds the body of the next request."""

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        self._endpoint = endpoint
        self._model = model
        self._messages: list[dict[str, str]] = []
        self._prompt: list[int] | str | None = None

    def ask(self, content: list[int] | str, num_output_tokens: int) -> bytes:
        """The JSON body of a request that adds `content`. Greedy, of exactly `num_output_tokens` tokens."""
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": num_output_tokens,
            "min_tokens": num_output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._endpoint == "chat":
            assert isinstance(content, str), "a chat message is text"
            self._messages.append({"role": "user", "content": content})
            body["messages"] = self._messages
        else:
            body["prompt"] = self._prompt = self._extended(content)
        return msgspec.json.encode(body)

    def hear(self, answer: str) -> None:
        """The server's answer, which the next request repeats."""
        if self._endpoint == "chat":
            self._messages.append({"role": "assistant", "content": answer})
        elif isinstance(self._prompt, str):
            self._prompt += answer

    def _extended(self, content: list[int] | str) -> list[int] | str:
        if self._prompt is None:
            return content
        assert isinstance(self._prompt, str), "a conversation over completions is text"
        assert isinstance(content, str), "a conversation over completions is text"
        return self._prompt + content


class BenchClient:
    """Sends requests over one connection pool. The records' times count from `start_clock`."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, endpoint: Endpoint, timeout_s: float) -> None:
        self._http = http
        self._url = base_url + _PATHS[endpoint]
        self._timeout_s = timeout_s
        self._clock_start = time.perf_counter()

    def start_clock(self) -> None:
        """Makes this moment the zero of all times."""
        self._clock_start = time.perf_counter()

    def now(self) -> float:
        """Seconds since `start_clock`."""
        return time.perf_counter() - self._clock_start

    async def send(self, body: bytes, num_asked: int, record: RequestRecord) -> str:
        """Sends one request, fills `record` and returns the answer's text; a failure ends up in `record.error`."""
        reader = StreamReader(record)
        record.send_s = self.now()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, reader)
            reader.finish(num_asked)
        except RequestFailed as error:
            record.error = str(error)
        except aiohttp.ClientError as error:  # before TimeoutError: aiohttp's own connect timeout is both
            record.error = _transport_error(error, record)
        except TimeoutError:
            record.error = (
                f"no complete answer within {self._timeout_s:g} s ({len(record.chunk_times_s)} chunks came); "
                "lower the load or raise --timeout"
            )
        except (OSError, ValueError) as error:
            record.error = _transport_error(error, record)
        record.end_s = self.now()
        return reader.text

    async def _stream(self, body: bytes, reader: StreamReader) -> None:
        parser = SSEParser()
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        async with self._http.post(self._url, data=body, headers=headers) as response:
            if response.status != 200:
                text = await response.content.read(_MAX_ERROR_BYTES)
                raise RequestFailed(f"HTTP {response.status}: {error_text(text)}")
            async for piece in response.content.iter_any():
                now = self.now()  # one time for all events of a piece: they arrived together
                for data in parser.feed(piece):
                    reader.take(data, now)


def open_http() -> aiohttp.ClientSession:
    """A connection pool without a limit of its own (a limit would queue requests unseen) and without proxies.

    It sends the API key of the environment, which so never gets into a report.
    """
    return aiohttp.ClientSession(
        headers=api_key_headers(),
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        trust_env=False,
    )


def _transport_error(error: Exception, record: RequestRecord) -> str:
    return f"{type(error).__name__}: {error} (after {len(record.chunk_times_s)} chunks)"
