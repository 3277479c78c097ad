"""LineAnswerer: one line of a batch becomes an answer as an HTTP request with its body would, within this process."""

import uuid
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ...core.timeline import Station, Timeline
from ..openai.formats import AnswerFormat, ChatFormat, CompletionFormat
from ..openai.request import ParsedRequest
from ..urgency import batch_urgency

if TYPE_CHECKING:  # the gateway has batches as one of its parts
    from ..gateway import Gateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDPOINTS = (CHAT, COMPLETIONS)
_LONG_BODY_BYTES = 256 * 1024


def new_request_id() -> str:
    return uuid.uuid4().hex


class LineAnswerer:
    """Bound to one gateway."""

    def __init__(self, gateway: "Gateway"):
        self._gateway = gateway

    async def answer(self, endpoint: str, owner: str, request_id: str, body: bytes) -> bytes:
        """The answer as JSON. When it is cancelled, what was generated for it ends.

        Raises RequestError for what is wrong with the body, and Unavailable (one too) when workers cannot serve it.
        """
        gateway = self._gateway
        self._gateway.dispatcher.require_open()
        timeline = Timeline().stamped(Station.RECEIVED)
        parsed, answer = await self._parsed(endpoint, request_id, body)
        if parsed.sampling.grammar:
            await gateway.grammars.check(parsed.sampling.grammar, parsed.grammar_param)
        prompts = await gateway.prompts.build(parsed, gateway.limits)
        response = gateway.respond(answer, parsed)
        try:
            response.start(
                prompts,
                gateway.tenants.namespace_of(owner, parsed.cache_salt),
                timeline.stamped(Station.TOKENISED),
                batch_urgency(parsed.priority, owner),
                partial(gateway.answer_parser, parsed),
            )
            return await response.whole()
        finally:
            response.close()

    async def _parsed(self, endpoint: str, request_id: str, body: bytes) -> tuple[ParsedRequest, AnswerFormat]:
        gateway = self._gateway
        parse = gateway.parser.chat if endpoint == CHAT else gateway.parser.completion
        parsed = parse(body) if len(body) <= _LONG_BODY_BYTES else await gateway.prompts.call(lambda: parse(body))
        parsed = msgspec.structs.replace(parsed, stream=False)
        name = gateway.config.served_model
        if endpoint == CHAT:
            return parsed, ChatFormat(f"chatcmpl-{request_id}", name, parsed, gateway.tokenizer)
        return parsed, CompletionFormat(f"cmpl-{request_id}", name, parsed, gateway.tokenizer)
