"""The gateway process: HTTP server, signals, drain. `run_gateway` is what a launcher's child process calls."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import uvloop
from aiohttp import web

from ..core.config import GatewayConfig
from ..core.errors import ConfigurationError
from .connection import Connection, connections
from .gateway import Gateway, open_gateway
from .handlers import routes
from .keys import ApiKeys
from .middleware import errors_as_json, keys_checked, note_begun, open_until_drained

_BACKLOG = 128  # connections that wait to be accepted
_CLOSE_TIMEOUT_S = 1.0  # for connections that are still open after that

logger = logging.getLogger(__name__)


def run_gateway(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT; then finish what runs, and tell new requests so. A second signal ends at once:
    open streams get their error event, within _CLOSE_TIMEOUT_S.

    Raises ConfigurationError when a port, a key file or the model cannot be used.
    """
    uvloop.run(serve(config))


async def serve(config: GatewayConfig) -> None:
    """As `run_gateway`, inside a running event loop."""
    stopping, killing = asyncio.Event(), asyncio.Event()
    _on_signals(stopping, killing)
    gateway, channel = open_gateway(config)
    if not config.debug:  # aiohttp logs a traceback for each malformed request, which anybody can send
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    try:
        async with serving(gateway) as server:
            logger.info("listening on http://%s:%d", config.host, server.port)
            gateway.grammars.start_soon()
            await _until(server.running, stopping)
            dispatcher = gateway.dispatcher
            logger.info("draining: %d requests", dispatcher.num_in_flight + dispatcher.num_queued)
            await _until(gateway.drain(config.drain_timeout_s), killing)
            if num_cut := dispatcher.num_in_flight + dispatcher.num_queued:
                logger.warning("%d requests were cut off: they get an error", num_cut)
    finally:
        channel.close()


class Server(NamedTuple):
    """A gateway that answers HTTP on `port`. `running` ends only by a bug, with its exception."""

    port: int
    running: asyncio.Task[None]


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[Server]:
    """The gateway on its HTTP port. Raises ConfigurationError when the port cannot be had."""
    config = gateway.config
    middlewares = [
        errors_as_json(gateway.metrics, gateway.dispatcher),
        keys_checked(ApiKeys(config.api_key_digests)),
        open_until_drained(gateway.dispatcher),
    ]
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_bytes)
    app.on_response_prepare.append(note_begun)
    app.add_routes(routes(gateway))
    # A handler is cancelled when its client leaves: that is how generations end whose answer nobody reads.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_CLOSE_TIMEOUT_S)
    await runner.setup()
    listening: asyncio.Server | None = None
    running = asyncio.create_task(gateway.run())
    try:
        listening = await _listen(connections(runner.server, gateway.metrics), config)
        await gateway.batches.resume()
        yield Server(listening.sockets[0].getsockname()[1], running)
    finally:
        gateway.dispatcher.stop("this server has been shut down")
        await gateway.batches.stop()
        if listening is not None:
            listening.close()
        await runner.cleanup()
        gateway.batches.close()
        running.cancel()
        await asyncio.wait([running])
        gateway.prompts.close()
        await gateway.grammars.close()


async def _listen(factory: Callable[[], Connection], config: GatewayConfig) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(factory, config.host, config.port, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}. Choose another port, or --port 0 for a "
            "free one"
        ) from error


def _on_signals(stopping: asyncio.Event, killing: asyncio.Event) -> None:
    def on_signal() -> None:
        (killing if stopping.is_set() else stopping).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


async def _until(work: Coroutine[Any, Any, None] | asyncio.Task[None], stop: asyncio.Event) -> None:
    """Runs `work` to its end, or until `stop` is set; what it raises is raised."""
    working, stopping = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        working.result()
