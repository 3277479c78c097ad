"""What surrounds every handler: API keys, a request id out, and every error as an error object."""

import logging
import re
import uuid
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..core.errors import RequestError
from .anthropic.answers import MESSAGES_PATH, anthropic_error
from .dispatcher import Dispatcher
from .generation import Unavailable
from .keys import ApiKeys
from .metrics import Metrics
from .openai.answers import answer_of, encode_json

_WORK = "/v1/"  # paths below it make tokens when they are posted to
_REQUEST_ID = web.RequestKey("request_id", str)
_API_KEY = web.RequestKey("api_key", str)
_HAS_BEGUN = web.RequestKey("has_begun", bool)
_OPEN_PATHS = ("/health", "/ready")  # for probes, which have no key and are told nothing of anybody's
_CLEAN_REQUEST_ID = re.compile(r"[!-~]{1,128}")

logger = logging.getLogger(__name__)


def request_id(request: web.BaseRequest) -> str:
    """The id of this HTTP exchange, minted here. What the client calls it is only echoed, never used as a key."""
    if _REQUEST_ID not in request:
        request[_REQUEST_ID] = uuid.uuid4().hex
    return request[_REQUEST_ID]


def shown_request_id(request: web.BaseRequest) -> str:
    """What X-Request-Id says in the answer: the client's own id when it is a clean header value."""
    given = request.headers.get("X-Request-Id", "")
    return given if _CLEAN_REQUEST_ID.fullmatch(given) else request_id(request)


def api_key(request: web.Request) -> str:
    """The key that was checked; "" when this server asks for none."""
    key: str = request.get(_API_KEY, "")
    return key


def keys_checked(keys: ApiKeys) -> Middleware:
    """The middleware in front of every path but those of probes: also of those that do not exist."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _OPEN_PATHS:
            request[_API_KEY] = keys.check(request.headers)
        return await handler(request)

    return middleware


def open_until_drained(dispatcher: Dispatcher) -> Middleware:
    """The middleware that refuses new work while this gateway drains. Paths of operation still answer: whoever waits
    for the end, or spreads the load, asks them.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST" and request.path.startswith(_WORK):
            dispatcher.require_open()
        return await handler(request)

    return middleware


def errors_as_json(metrics: Metrics, dispatcher: Dispatcher) -> Middleware:
    """The middleware. Errors of a stream that has begun are events of it, and do not come here. What fails beside them
    (a bug) cuts the connection: a second answer within the first would be taken for a part of it.

    While this gateway drains, each answer is the last one on its connection: the next request had better go elsewhere.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except Exception as error:
            if _HAS_BEGUN in request:
                logger.exception("an answer that had begun failed")
                metrics.responded(HTTPStatus.INTERNAL_SERVER_ERROR)
                raise
            response = _answer_to(request, error)
        if not response.prepared:
            response.headers["X-Request-Id"] = shown_request_id(request)
            if dispatcher.is_draining:
                response.force_close()
        if request.path != "/ready":  # its 503 is an answer, and whoever waits for a start asks for it all the time
            metrics.responded(response.status)
        return response

    return middleware


async def note_begun(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: the head of an answer goes out."""
    request[_HAS_BEGUN] = True


def _answer_to(request: web.Request, error: Exception) -> web.Response:
    if isinstance(error, RequestError):
        return error_response(request, error)
    if isinstance(error, web.HTTPException):
        return http_error(request, error)
    if isinstance(error, web.RequestPayloadError):
        coding = request.headers.get("Content-Encoding", "chunked")[:40]
        return error_response(request, RequestError(f"the body cannot be read: it is no whole {coding} data"))
    # A bug: the client gets an error and no details, the log gets the traceback.
    logger.error("a request failed", exc_info=error)
    return error_response(request, RequestError("the server failed here; its log says why", status=500))


def error_response(request: web.BaseRequest, error: RequestError) -> web.Response:
    """The error object, with the headers that belong to it."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == HTTPStatus.UNAUTHORIZED else {}
    if isinstance(error, Unavailable):
        headers |= error.headers
        if error.retry_after is not None:
            headers["Retry-After"] = str(error.retry_after)
    return _spelled(request, error, headers)


def http_error(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """aiohttp's own: no such path, wrong method, body too large, an expectation that is not met."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        message = f"the body is too large: this server takes at most {request.client_max_size:,} bytes"
    elif isinstance(error, web.HTTPMethodNotAllowed):
        message = f"this path takes {', '.join(sorted(error.allowed_methods))} only"
    elif isinstance(error, web.HTTPNotFound):
        message = "there is no such path; GET / lists what there is"
    elif isinstance(error, web.HTTPExpectationFailed):
        message = "the Expect header asks for what this server does not do; leave it out"
    else:
        message = error.reason
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return _spelled(request, RequestError(message, status=error.status), headers)


def _spelled(request: web.BaseRequest, error: RequestError, headers: dict[str, str]) -> web.Response:
    """The error object as clients of this path know it."""
    is_anthropic = request.path == MESSAGES_PATH or request.path.startswith(f"{MESSAGES_PATH}/")
    value = anthropic_error(error, shown_request_id(request)) if is_anthropic else answer_of(error)
    return web.Response(body=encode_json(value), status=error.status, content_type="application/json", headers=headers)
