"""A fake OpenAI server whose answers a test scripts piece by piece; it sends nothing that the script does not say."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

Script = Callable[[dict], AsyncIterator[bytes]]


def event(data: object) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def token_event(text: str, finish_reason: str | None = None, **extra: object) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason, **extra}]})


def usage_event(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> bytes:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    return event({"choices": [], "usage": usage})


DONE = b"data: [DONE]\n\n"


def prompt_length(body: dict) -> int:
    if "messages" in body:
        return sum(len(message["content"].split()) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else len(prompt.split())


async def good_answer(body: dict) -> AsyncIterator[bytes]:
    """Exactly `max_tokens` tokens, one a chunk, in the shape of the asked endpoint."""
    for index in range(body["max_tokens"]):
        finish_reason = "length" if index + 1 == body["max_tokens"] else None
        if "messages" in body:
            yield event({"choices": [{"delta": {"content": f" w{index}"}, "finish_reason": finish_reason}]})
        else:
            yield token_event(f" w{index}", finish_reason)
    yield usage_event(prompt_length(body), body["max_tokens"], cached_tokens=1)
    yield DONE


class FakeServer:
    """`script` answers a request; `status` other than 200 answers with an OpenAI error object instead."""

    token = staticmethod(token_event)
    usage = staticmethod(usage_event)
    event = staticmethod(event)
    DONE = DONE

    def __init__(self) -> None:
        self.script: Script = good_answer
        self.status = 200
        self.models: dict | None = {"data": [{"id": "fake", "max_model_len": 4096, "vocab_size": 1000}]}
        self.bodies: list[dict] = []
        self._app = web.Application(client_max_size=1 << 26)
        self._app.router.add_get("/v1/models", self._list_models)
        self._app.router.add_post("/v1/completions", self._answer)
        self._app.router.add_post("/v1/chat/completions", self._answer)
        self._server = TestServer(self._app)

    async def __aenter__(self) -> "FakeServer":
        await self._server.start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return str(self._server.make_url("")).rstrip("/")

    async def _list_models(self, _: web.Request) -> web.Response:
        if self.models is None:
            return web.json_response({"error": {"message": "no such route"}}, status=404)
        return web.json_response(self.models)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "too busy", "code": "x"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with suppress(ConnectionError):  # the client may leave before the end
            async for piece in self.script(body):
                await response.write(piece)
        return response


@contextmanager
def running_in_thread() -> Iterator[FakeServer]:
    """A FakeServer with a loop of its own, for code that makes its own loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = FakeServer()
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture
def server_in_thread() -> Iterator[FakeServer]:
    with running_in_thread() as server:
        yield server


@pytest.fixture
def fake_server() -> type[FakeServer]:
    return FakeServer


@pytest.fixture
def unused_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
