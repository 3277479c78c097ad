"""HTTP handlers of the Anthropic API: POST /v1/messages and /v1/messages/count_tokens."""

import msgspec
from aiohttp import web

from .answering import Answering, json_answer
from .anthropic.answers import MESSAGES_PATH, CountedTokens
from .anthropic.fields import CountTokensRequest, MessagesRequest
from .anthropic.format import MessagesFormat
from .anthropic.translation import NAMES, chat_request
from .gateway import Gateway
from .middleware import request_id
from .openai.json_errors import read_json
from .openai.request import ParsedRequest


def messages_routes(gateway: Gateway) -> list[web.RouteDef]:
    """Bound to one gateway."""
    handlers = MessagesHandlers(gateway)
    return [
        web.post(MESSAGES_PATH, handlers.create),
        web.post(f"{MESSAGES_PATH}/count_tokens", handlers.count_tokens),
    ]


class MessagesHandlers:
    """Bound to one gateway."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._answering = Answering(gateway)
        self._message = msgspec.json.Decoder(MessagesRequest)
        self._count = msgspec.json.Decoder(CountTokensRequest)

    async def create(self, request: web.Request) -> web.StreamResponse:
        with NAMES.told():
            timeline, parsed = await self._answering.receive(
                request, lambda body: self._parsed(read_json(self._message, body))
            )
            answer = MessagesFormat(f"msg_{request_id(request)}", self._gateway.config.served_model)
            return await self._answering.answer(request, parsed, timeline, answer)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        with NAMES.told():
            _, parsed = await self._answering.receive(request, lambda body: self._parsed(read_json(self._count, body)))
            (token_ids,) = await self._gateway.prompts.encode(parsed.prompt, self._gateway.limits)
        return json_answer(CountedTokens(len(token_ids)))

    def _parsed(self, fields: CountTokensRequest) -> ParsedRequest:
        return self._gateway.parser.chat_fields(chat_request(fields))
