"""A running server, asked over HTTP by the commands that talk to one: `baton chat`, `baton roles`.

An API key comes from the environment (core/credentials.py).
"""

import http.client
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from ..core.credentials import api_key_headers
from ..core.errors import BatonError, ConfigurationError

TIMEOUT_S = 120.0  # between two signs of life; the server sends comments while a prompt is computed

JsonObject = dict[str, object]
Answer = TypeVar("Answer")


class ServerError(msgspec.Struct):
    """The OpenAI error object."""

    message: str = "the server gave no reason"


class _Failure(msgspec.Struct):
    error: ServerError | None = None


class ServerClient:
    """Raises ConfigurationError for what is no URL."""

    def __init__(self, url: str):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"{url!r} is not a server. Write for example http://127.0.0.1:8000.")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.name = parts.netloc

    def request(self, method: str, path: str, body: JsonObject | None = None) -> http.client.HTTPResponse:
        """An answer whose body is to be read. Raises BatonError with the server's own words for anything but 200."""
        connection = self._kind(self._host, self._port, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/json", "Connection": "close"} | api_key_headers()
        try:
            connection.request(method, self._path + path, None if body is None else msgspec.json.encode(body), headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise BatonError(
                f"no answer from {self.name} ({error}). Is the server running? `baton serve` starts one."
            ) from error
        if response.status != http.HTTPStatus.OK:
            failure = decode_answer(response.read(), _Failure)
            raise BatonError(failure.error.message if failure.error else f"HTTP status {response.status}")
        return response


def decode_answer(content: bytes, kind: type[Answer], server: str = "an OpenAI-compatible server") -> Answer:
    """Raises BatonError when it is none of the kind."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BatonError(f"the answer is not that of {server}. Check the URL.") from error
