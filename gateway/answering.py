"""Answering: from an HTTP request with a body to an HTTP response, whole or streamed; what all endpoints share."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

from aiohttp import web

from ..core.timeline import Station, Timeline
from .bodies import read_body
from .event_sink import EventSink
from .gateway import Gateway
from .keys import sent_key
from .middleware import api_key, shown_request_id
from .openai.answers import encode_json
from .openai.formats import AnswerFormat
from .openai.request import ParsedRequest
from .stream import Response, spell_timing
from .urgency import urgency_of

LONG_BODY_BYTES = 256 * 1024
CLIENT_STALL_S = 120.0  # for a client to take what was written to it

_T = TypeVar("_T")

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Answering:
    """Bound to one gateway."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway

    async def receive(self, request: web.Request, parse: Callable[[bytes], _T]) -> tuple[Timeline, _T]:
        """The body, parsed. Long ones are parsed on another thread, so that they hold nobody up."""
        body = await read_body(request)
        timeline = Timeline().stamped(Station.RECEIVED)
        if len(body) <= LONG_BODY_BYTES:
            return timeline, parse(body)
        return timeline, await self._gateway.prompts.call(lambda: parse(body))

    async def answer(
        self, request: web.Request, parsed: ParsedRequest, timeline: Timeline, format: AnswerFormat
    ) -> web.StreamResponse:
        """Has the request generated, and spelled by `format`."""
        gateway = self._gateway
        urgency = urgency_of(parsed.priority, parsed.service_tier, sent_key(request.headers))
        namespace = gateway.tenants.namespace(api_key(request), parsed.cache_salt)
        async with gateway.generating(parsed, format, timeline, urgency, namespace) as response:
            if parsed.stream:
                await response.wait_for_start()
                # In a task of its own: each token wakes it, and would run through all that surrounds a handler else.
                return await asyncio.create_task(self._stream(request, response))
            body = await response.whole()
            headers = {"Server-Timing": spell_timing(response.timeline)} | response.queue_headers
            return web.Response(body=body, content_type="application/json", headers=headers)

    async def _stream(self, request: web.Request, response: Response) -> web.StreamResponse:
        headers = _SSE_HEADERS | {"X-Request-Id": shown_request_id(request)} | response.queue_headers
        stream = web.StreamResponse(headers=headers)
        sink = EventSink(request, stream)
        writer = await stream.prepare(request)
        assert writer is not None  # it is the answer to this request
        try:
            async with aclosing(response.events(sink)) as events:
                async for event in events:
                    response.is_client_behind = sink.is_behind(len(event))
                    if response.is_client_behind:
                        async with asyncio.timeout(CLIENT_STALL_S):
                            await stream.write(event)
                            await writer.drain()  # tokens that come meanwhile will be one chunk
                    else:
                        await stream.write(event)
            await stream.write_eof()
        except (TimeoutError, ConnectionError):
            # The client is gone or takes nothing; `close` ends its generations.
            if request.transport is not None:
                request.transport.abort()
        return stream


def json_answer(value: object) -> web.Response:
    return web.Response(body=encode_json(value), content_type="application/json")
