"""HTTP handlers: what each path does. Errors are raised and become OpenAI error objects in `middleware.py`."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

from aiohttp import web

from ..core.errors import RequestError
from ..core.messages import FlushCache, Flushed, LedgerQuery, LedgerReport
from ..core.timeline import Station, Timeline
from .fleet import describe_fleet, describe_tuning
from .gateway import Gateway
from .generation import Unavailable
from .middleware import request_id, shown_request_id
from .openai_api import ParsedRequest
from .openai_format import ChatFormat, CompletionFormat, encode_json
from .role_handlers import role_routes
from .stream import Response, spell_timing
from .urgency import urgency_of

BODY_TIMEOUT_S = 60.0  # for a body to arrive
LONG_BODY_BYTES = 256 * 1024
CLIENT_STALL_S = 120.0  # for a client to take what was written to it

_Format = TypeVar("_Format", CompletionFormat, ChatFormat)

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Every path there is."""
    handlers = Handlers(gateway)
    return [
        web.get("/", handlers.index),
        web.get("/v1/models", handlers.models),
        web.get("/v1/models/{model:.+}", handlers.model),
        web.post("/v1/completions", handlers.completions),
        web.post("/v1/chat/completions", handlers.chat_completions),
        web.get("/health", handlers.health),
        web.get("/ready", handlers.ready),
        web.get("/workers", handlers.workers),
        web.get("/tuner", handlers.tuner),
        web.get("/ledger", handlers.ledger),
        web.post("/flush_cache", handlers.flush_cache),
        web.get("/metrics", handlers.metrics),
        *role_routes(gateway.roles),
    ]


class Handlers:
    """Bound to one gateway."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway

    # ---- OpenAI ---------------------------------------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        self._gateway.parser.check_model(request.match_info["model"])
        return _json(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._gateway.config.served_model,
            "object": "model",
            "created": self._gateway.started_at,
            "owned_by": "baton",
            "max_model_len": self._gateway.limits.max_tokens,
            "vocab_size": self._gateway.vocab_size,
        }

    async def completions(self, request: web.Request) -> web.StreamResponse:
        timeline, body = await self._receive(request)
        parsed = await self._parse(self._gateway.parser.completion, body)
        answer = self._format(CompletionFormat, f"cmpl-{request_id(request)}", parsed)
        return await self._answer(request, parsed, timeline, self._gateway.respond(answer))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        timeline, body = await self._receive(request)
        parsed = await self._parse(self._gateway.parser.chat, body)
        answer = self._format(ChatFormat, f"chatcmpl-{request_id(request)}", parsed)
        return await self._answer(request, parsed, timeline, self._gateway.respond(answer))

    def _format(self, kind: type[_Format], answer_id: str, parsed: ParsedRequest) -> _Format:
        return kind(
            answer_id,
            self._gateway.config.served_model,
            with_usage=parsed.include_usage,
            with_token_ids=parsed.return_token_ids,
            service_tier=parsed.service_tier,
        )

    async def _receive(self, request: web.Request) -> tuple[Timeline, bytes]:
        announced = request.content_length or 0
        if announced > request.client_max_size:  # known before the body comes
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, announced)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await request.read()
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408) from None
        return Timeline().stamped(Station.RECEIVED), body

    async def _parse(self, parse: Callable[[bytes], ParsedRequest], body: bytes) -> ParsedRequest:
        """Long bodies are read on another thread, so that they hold nobody up."""
        if len(body) <= LONG_BODY_BYTES:
            return parse(body)
        return await self._gateway.prompts.call(lambda: parse(body))

    async def _answer(
        self, request: web.Request, parsed: ParsedRequest, timeline: Timeline, response: Response
    ) -> web.StreamResponse:
        prompts = await self._gateway.prompts.build(parsed, self._gateway.limits)
        timeline = timeline.stamped(Station.TOKENISED)
        urgency = urgency_of(parsed.priority, parsed.service_tier, request.headers.get("Authorization", ""))
        try:
            response.start(prompts, self._gateway.config.model_digest, timeline, parsed.stop, urgency)
            if parsed.stream:
                await response.wait_for_start()
                return await self._stream(request, parsed, response)
            body = await response.whole()
            headers = {"Server-Timing": spell_timing(response.timeline)} | response.queue_headers
            return web.Response(body=body, content_type="application/json", headers=headers)
        except Unavailable as error:
            error.headers = response.queue_headers
            raise
        finally:
            response.close()

    async def _stream(self, request: web.Request, parsed: ParsedRequest, response: Response) -> web.StreamResponse:
        headers = _SSE_HEADERS | {"X-Request-Id": shown_request_id(request)} | response.queue_headers
        stream = web.StreamResponse(headers=headers)
        await stream.prepare(request)
        try:
            async with aclosing(response.events(include_usage=parsed.include_usage)) as events:
                async for event in events:
                    async with asyncio.timeout(CLIENT_STALL_S):
                        await stream.write(event)
            await stream.write_eof()
        except (TimeoutError, ConnectionError):
            # The client is gone or takes nothing; `close` ends its generations.
            if request.transport is not None:
                request.transport.abort()
        return stream

    # ---- operation ------------------------------------------------------------------------------------------------

    async def index(self, request: web.Request) -> web.StreamResponse:
        paths = [
            "/v1/models",
            "/v1/completions",
            "/v1/chat/completions",
            "/health",
            "/ready",
            "/workers",
            "/tuner",
            "/roles",
            "/ledger",
            "/metrics",
        ]
        return _json({"server": "baton", "model": self._gateway.config.served_model, "endpoints": paths})

    async def health(self, request: web.Request) -> web.StreamResponse:
        """This process is alive; nothing more."""
        return _json({"status": "ok"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        report = self._gateway.probe.report()
        if report["ready"]:
            return _json(report)
        return _json(report, status=503, headers={"Retry-After": "1"})

    async def workers(self, request: web.Request) -> web.StreamResponse:
        """Who is here, with what device and pool, and how KV travels between them now."""
        await self._gateway.cluster.ask_all(LedgerQuery)  # before they answer, workers send a fresh Status
        workers = list(self._gateway.membership.workers.values())
        return _json({"workers": describe_fleet(workers, self._gateway.backlogs)})

    async def tuner(self, request: web.Request) -> web.StreamResponse:
        """What each worker has learned of its steps, the settings it runs with, and why they are what they are."""
        await self._gateway.cluster.ask_all(LedgerQuery)  # as for /workers
        config, workers = self._gateway.config, list(self._gateway.membership.workers.values())
        targets = {"ttft_s": config.ttft_target_s, "tpot_s": config.tpot_target_s}
        return _json({"targets": targets, "workers": describe_tuning(workers, time.time() - time.monotonic())})

    async def ledger(self, request: web.Request) -> web.StreamResponse:
        """Who owns the blocks of each worker, and what is in flight here; idle when nothing is, anywhere."""
        reports = await self._gateway.cluster.ask_all(LedgerQuery)
        workers = {}
        for ref, report in reports.items():
            if isinstance(report, LedgerReport):
                ledger = report.ledger
                counts = {name: getattr(ledger, name) for name in ledger.__struct_fields__}
                workers[ref.node_id] = counts | {"idle": ledger.idle}
            else:
                workers[ref.node_id] = {"idle": False, "error": "no answer"}
        dispatcher = self._gateway.dispatcher
        here = {"in_flight": dispatcher.num_in_flight, "queued": dispatcher.num_queued}
        idle = all(worker["idle"] for worker in workers.values()) and not any(here.values())
        return _json({"workers": workers, "gateway": here, "idle": idle})

    async def flush_cache(self, request: web.Request) -> web.StreamResponse:
        reports = await self._gateway.cluster.ask_all(FlushCache)
        flushed = {ref.node_id: r.num_blocks if isinstance(r, Flushed) else None for ref, r in reports.items()}
        complete = None not in flushed.values()
        return _json({"flushed_blocks": flushed, "complete": complete}, status=200 if complete else 503)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        dispatcher = self._gateway.dispatcher
        text = self._gateway.metrics.render(
            dispatcher.num_in_flight, dispatcher.num_queued, dispatcher.num_batch_queued
        )
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode_json(value), status=status, content_type="application/json", headers=headers)
