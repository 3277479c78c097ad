"""Bodies: of requests, read whole, within bounds of size and time, whichever path they are sent to."""

import asyncio

from aiohttp import web

from ..core.errors import RequestError

BODY_TIMEOUT_S = 60.0  # for a body to arrive


async def read_body(request: web.Request) -> bytes:
    """Raises RequestError (408) for one that does not arrive in time, and aiohttp's error (413) for one too large."""
    announced = request.content_length or 0
    if announced > request.client_max_size:  # known before the body comes
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, announced)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408) from None
