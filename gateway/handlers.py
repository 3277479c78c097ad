"""HTTP handlers: every path there is, and what the operational ones do.

Errors are raised and become OpenAI error objects in `middleware.py`.
"""

import time

from aiohttp import web

from .. import __version__
from ..core.messages import FlushCache, Flushed, LedgerQuery, LedgerReport
from .batches.handlers import batch_routes
from .fleet import describe_fleet, describe_tuning
from .gateway import Gateway
from .messages_handlers import messages_routes
from .openai.answers import Version, encode_json
from .openai.schema import openapi
from .openai_handlers import openai_routes
from .responses_handlers import responses_routes
from .role_handlers import role_routes


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Every path there is."""
    handlers = Handlers(gateway)
    return [
        web.get("/", handlers.index),
        web.get("/version", handlers.version),
        web.get("/openapi.json", handlers.openapi),
        web.get("/health", handlers.health),
        web.get("/ready", handlers.ready),
        web.get("/workers", handlers.workers),
        web.get("/tuner", handlers.tuner),
        web.get("/ledger", handlers.ledger),
        web.post("/flush_cache", handlers.flush_cache),
        web.get("/metrics", handlers.metrics),
        *role_routes(gateway.roles),
        *openai_routes(gateway),
        *responses_routes(gateway),
        *messages_routes(gateway),
        *batch_routes(gateway),
    ]


class Handlers:
    """Bound to one gateway."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway

    async def index(self, request: web.Request) -> web.StreamResponse:
        return _json(
            {"server": "baton", "model": self._gateway.config.served_model, "endpoints": list(openapi()["paths"])}
        )

    async def version(self, request: web.Request) -> web.StreamResponse:
        return _json(Version(__version__))

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return _json(openapi())

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
