"""LineAnswerer: one line of a batch becomes an answer as an HTTP request with its body would, within this process."""

import uuid
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import msgspec

from ...core.errors import RequestError
from ...core.timeline import Station, Timeline
from ..openai.formats import AnswerFormat, ChatFormat, CompletionFormat
from ..openai.json_errors import read_json
from ..openai.request import ParsedRequest
from ..responses.fields import ResponsesRequest
from ..responses.format import ResponsesFormat, begun_response
from ..responses.translation import NAMES, chat_request
from ..urgency import batch_urgency
from .objects import ENDPOINTS

if TYPE_CHECKING:  # the gateway has batches as one of its parts
    from ..gateway import Gateway

_LONG_BODY_BYTES = 256 * 1024

_decode_responses = msgspec.json.Decoder(ResponsesRequest)
_Parsed = tuple[ParsedRequest, AnswerFormat]


def new_request_id() -> str:
    return uuid.uuid4().hex


class LineAnswerer:
    """Bound to one gateway."""

    def __init__(self, gateway: "Gateway"):
        self._gateway = gateway
        self._parsers: dict[str, Callable[[str, bytes], _Parsed]] = dict(
            zip(ENDPOINTS, (self._chat, self._completion, self._response), strict=True)
        )

    async def answer(self, endpoint: str, owner: str, request_id: str, body: bytes) -> bytes:
        """The answer as JSON. When it is cancelled, what was generated for it ends.

        Raises RequestError for what is wrong with the body, and Unavailable (one too) when workers cannot serve it.
        """
        gateway = self._gateway
        gateway.dispatcher.require_open()
        timeline = Timeline().stamped(Station.RECEIVED)
        with NAMES.told() if endpoint == "/v1/responses" else nullcontext():
            request, answer = await self._parsed(endpoint, request_id, body)
            urgency = batch_urgency(request.priority, owner)
            namespace = gateway.tenants.namespace_of(owner, request.cache_salt)
            async with gateway.generating(request, answer, timeline, urgency, namespace) as response:
                return await response.whole()

    async def _parsed(self, endpoint: str, request_id: str, body: bytes) -> _Parsed:
        parse = self._parsers[endpoint]
        if len(body) <= _LONG_BODY_BYTES:
            return parse(request_id, body)
        return await self._gateway.prompts.call(lambda: parse(request_id, body))

    def _chat(self, request_id: str, body: bytes) -> _Parsed:
        gateway = self._gateway
        request = gateway.parser.chat(body)
        name = gateway.config.served_model
        return request, ChatFormat(f"chatcmpl-{request_id}", name, request, gateway.tokenizer)

    def _completion(self, request_id: str, body: bytes) -> _Parsed:
        gateway = self._gateway
        request = gateway.parser.completion(body)
        name = gateway.config.served_model
        return request, CompletionFormat(f"cmpl-{request_id}", name, request, gateway.tokenizer)

    def _response(self, request_id: str, body: bytes) -> _Parsed:
        """Not stored: nobody waits for a line's answer to go on with it."""
        gateway = self._gateway
        fields = read_json(_decode_responses, body)
        gateway.parser.check_model(fields.model)
        if fields.previous_response_id is not None:
            raise RequestError(
                "previous_response_id: a line of a batch continues nothing; send the items as input",
                "previous_response_id",
                "unsupported_parameter",
            )
        fields.store = False
        request = gateway.parser.chat_fields(chat_request(fields, []))
        begun = begun_response(f"resp_{request_id}", gateway.config.served_model, fields, request.service_tier)
        return request, ResponsesFormat(begun, request, gateway.tokenizer, lambda response: None)
