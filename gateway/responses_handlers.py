"""HTTP handlers of the Responses API: answers, what is stored of them, and counts of tokens."""

from functools import partial

from aiohttp import web

from ..core.errors import RequestError
from .answering import Answering, json_answer
from .gateway import Gateway
from .keys import owner_of
from .middleware import api_key, request_id
from .openai.json_errors import bounded
from .paging import MOST_ITEMS, parse_page
from .responses.answers import CountedInput, DeletedResponse
from .responses.service import Responses
from .responses.store import StoredResponse
from .responses.translation import NAMES

_ITEMS_PAGE = 20


def responses_routes(gateway: Gateway) -> list[web.RouteDef]:
    """Bound to one gateway."""
    handlers = ResponsesHandlers(gateway)
    return [
        web.post("/v1/responses", handlers.create),
        web.post("/v1/responses/input_tokens", handlers.count_tokens),
        web.get("/v1/responses/{response_id}", handlers.retrieve),
        web.get("/v1/responses/{response_id}/input_items", handlers.input_items),
        web.delete("/v1/responses/{response_id}", handlers.delete),
    ]


class ResponsesHandlers:
    """Bound to one gateway."""

    def __init__(self, gateway: Gateway):
        self._responses = Responses(gateway.parser, gateway.tokenizer, gateway.config.served_model)
        self._gateway = gateway
        self._answering = Answering(gateway)

    async def create(self, request: web.Request) -> web.StreamResponse:
        owner = owner_of(api_key(request))
        with NAMES.told():
            timeline, asked = await self._answering.receive(request, partial(self._responses.parse, owner))
            answer = self._responses.format(asked, owner, request_id(request))
            return await self._answering.answer(request, asked.parsed, timeline, answer)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        owner = owner_of(api_key(request))
        with NAMES.told():
            _, asked = await self._answering.receive(request, partial(self._responses.parse, owner))
            (token_ids,) = await self._gateway.prompts.encode(asked.parsed.prompt, self._gateway.limits)
        return json_answer(CountedInput(len(token_ids)))

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("stream", "false").lower() != "false":
            raise RequestError("stream: a stored response comes as a whole; leave it out", "stream")
        return web.Response(body=self._stored(request).answer, content_type="application/json")

    async def input_items(self, request: web.Request) -> web.StreamResponse:
        page = parse_page(request.query, _ITEMS_PAGE, MOST_ITEMS)
        return json_answer(self._responses.input_items(self._stored(request), page))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        response_id = request.match_info["response_id"]
        if not self._responses.store.delete(owner_of(api_key(request)), response_id):
            raise _not_found(response_id)
        return json_answer(DeletedResponse(response_id))

    def _stored(self, request: web.Request) -> StoredResponse:
        response_id = request.match_info["response_id"]
        stored = self._responses.store.get(owner_of(api_key(request)), response_id)
        if stored is None:
            raise _not_found(response_id)
        return stored


def _not_found(response_id: str) -> RequestError:
    message = f"there is no response {bounded(response_id, 80)!r} here (any more)"
    return RequestError(message, "response_id", "response_not_found", 404)
