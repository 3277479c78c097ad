"""A bare aiohttp server that streams prebuilt chunks: what a gateway's streams are measured against."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_DONE = b"data: [DONE]\n\n"


def prebuilt_chunks(texts: Sequence[str], model: str) -> list[bytes]:
    """Events like those of /v1/completions, one for each text, and the end."""
    envelope = {"id": f"cmpl-{0:032x}", "object": "text_completion", "created": 1_700_000_000, "model": model}
    chunks = []
    for text, reason in [*((text, None) for text in texts), ("", "length")]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        chunks.append(b"data: " + msgspec.json.encode({**envelope, "choices": [choice]}) + b"\n\n")
    return [*chunks, _DONE]


@asynccontextmanager
async def bare_server(chunks: Sequence[bytes], *, yields: bool) -> AsyncIterator[int]:
    """Serves them on the port it gives. `yields`: after each chunk the other streams have their turn, as when tokens
    come one at a time; else the event loop joins what is written to a socket until it is full.
    """

    async def stream(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            if yields:
                await asyncio.sleep(0)
        await response.write_eof()
        return response

    app = web.Application()
    app.add_routes([web.post("/v1/completions", stream)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
