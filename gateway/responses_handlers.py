"""HTTP handlers of the Responses API: POST /v1/responses, and GET and DELETE of what it has stored."""

from functools import partial

import msgspec
from aiohttp import web

from ..core.errors import RequestError
from .answering import Answering, json_answer
from .gateway import Gateway
from .keys import owner_of
from .middleware import api_key, request_id
from .openai.answers import encode_json
from .openai.json_errors import bounded, read_json
from .openai.request import ParsedRequest
from .responses.answers import DeletedResponse, ResponseObject
from .responses.fields import InputItem, ResponsesRequest
from .responses.format import ResponsesFormat, begun_response
from .responses.store import ResponseStore, StoredResponse
from .responses.translation import NAMES, chat_request, input_items


def responses_routes(gateway: Gateway) -> list[web.RouteDef]:
    """Bound to one gateway."""
    handlers = ResponsesHandlers(gateway)
    return [
        web.post("/v1/responses", handlers.create),
        web.get("/v1/responses/{response_id}", handlers.retrieve),
        web.delete("/v1/responses/{response_id}", handlers.delete),
    ]


class ResponsesHandlers:
    """Bound to one gateway; what it stores is gone with it."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._answering = Answering(gateway)
        self._store = ResponseStore()
        self._body = msgspec.json.Decoder(ResponsesRequest)
        self._items = msgspec.json.Decoder(list[InputItem])

    async def create(self, request: web.Request) -> web.StreamResponse:
        owner = owner_of(api_key(request))
        with NAMES.told():
            timeline, (fields, earlier, parsed) = await self._answering.receive(request, partial(self._parse, owner))
            gateway = self._gateway
            response_id = f"resp_{request_id(request)}"
            response = begun_response(response_id, gateway.config.served_model, fields, parsed.service_tier)

            def keep(response: ResponseObject) -> None:
                if response.store:
                    conversation = encode_json([*earlier, *input_items(fields), *response.output])
                    self._store.put(owner, response_id, StoredResponse(encode_json(response), conversation))

            answer = ResponsesFormat(response, parsed, gateway.tokenizer, keep)
            return await self._answering.answer(request, parsed, timeline, answer)

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        response_id = request.match_info["response_id"]
        if request.query.get("stream", "false").lower() != "false":
            raise RequestError("stream: a stored response comes as a whole; leave it out", "stream")
        stored = self._store.get(owner_of(api_key(request)), response_id)
        if stored is None:
            raise _not_found(response_id)
        return web.Response(body=stored.answer, content_type="application/json")

    async def delete(self, request: web.Request) -> web.StreamResponse:
        response_id = request.match_info["response_id"]
        if not self._store.delete(owner_of(api_key(request)), response_id):
            raise _not_found(response_id)
        return json_answer(DeletedResponse(response_id))

    def _parse(self, owner: str, body: bytes) -> tuple[ResponsesRequest, list[InputItem], ParsedRequest]:
        """The body, the conversation that it continues, and both as a chat request."""
        fields = read_json(self._body, body)
        self._gateway.parser.check_model(fields.model)
        earlier: list[InputItem] = []
        if fields.previous_response_id is not None:
            stored = self._store.get(owner, fields.previous_response_id)
            if stored is None:
                raise RequestError(
                    f"previous_response_id: {bounded(fields.previous_response_id, 80)!r} is not stored here (any "
                    "more); send its items as input",
                    "previous_response_id",
                    "previous_response_not_found",
                )
            earlier = self._items.decode(stored.conversation)
        return fields, earlier, self._gateway.parser.chat_fields(chat_request(fields, earlier))


def _not_found(response_id: str) -> RequestError:
    message = f"there is no response {bounded(response_id, 80)!r} here (any more)"
    return RequestError(message, "response_id", "response_not_found", 404)
