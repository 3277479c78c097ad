"""Connection: aiohttp's protocol of one connection, with its own errors as error objects too.

What breaks HTTP's rules never becomes a request, and no middleware sees it; neither does an expectation that nobody
meets. Both are answered here. aiohttp documents the class and not how to put another in its place, so this is all there
is of that: `Server` makes the factory, the two methods below are overridden, and test_gateway_odd_http.py fails should
aiohttp come to call others.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from ..core.errors import RequestError
from .metrics import Metrics
from .middleware import error_response, http_error, shown_request_id
from .openai.json_errors import bounded


class Connection(web.RequestHandler):
    """`server` is the running application's."""

    __slots__ = ("_metrics",)

    def __init__(self, server: web.Server, metrics: Metrics):
        # `access_log` None is aiohttp's way to have no log of accesses; its types know loggers only.
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=None)  # type: ignore[arg-type]
        self._metrics = metrics

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what is no HTTP request, and to a bug around the middlewares. The connection closes.

        Raises ConnectionError when an answer has begun: the connection is cut.
        """
        super().handle_error(request, status, exc, message)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            text = "the server failed here; its log says why"
        elif isinstance(exc, ContentEncodingError):
            text = "this Content-Encoding is not understood here; send the body as it is, or as gzip or deflate"
        else:
            text = bounded(f"this is no valid HTTP request: {' '.join((message or '').split())}")
        response = self._noted(request, error_response(request, RequestError(text, status=status)))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """An exception comes here when it was raised before any middleware: for an unknown Expect header."""
        if isinstance(resp, web.HTTPException):
            resp = self._noted(request, http_error(request, resp))
        return await super().finish_response(request, resp, start_time)

    def _noted(self, request: web.BaseRequest, response: web.Response) -> web.Response:
        """What the middleware does with all others."""
        response.headers["X-Request-Id"] = shown_request_id(request)
        self._metrics.responded(response.status)
        return response


def connections(server: web.Server | None, metrics: Metrics) -> Callable[[], Connection]:
    """The factory for `create_server`. `server`: of a runner that is set up."""
    assert server is not None
    return lambda: Connection(server, metrics)
