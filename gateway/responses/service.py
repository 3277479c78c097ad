"""Responses: bodies of /v1/responses in, answers to them out, and what is kept in between. No I/O."""

from collections.abc import Sequence

import msgspec

from ...core.errors import RequestError
from ...vocab.tokenizer import Tokenizer
from ..openai.answers import encode_json
from ..openai.json_errors import bounded, read_json
from ..openai.parser import RequestParser
from ..openai.request import ParsedRequest
from .answers import ResponseObject
from .fields import InputItem, ResponsesRequest
from .format import ResponsesFormat, begun_response
from .store import ResponseStore, StoredResponse
from .translation import chat_request, input_items


class AskedResponse(msgspec.Struct, frozen=True):
    """A body, the conversation that it continues, and both as a chat request."""

    fields: ResponsesRequest
    earlier: Sequence[InputItem]
    parsed: ParsedRequest


class Responses:
    """Of one gateway; what it keeps is gone with it."""

    def __init__(self, parser: RequestParser, tokenizer: Tokenizer, served_model: str):
        self._parser = parser
        self._tokenizer = tokenizer
        self._served_model = served_model
        self._body = msgspec.json.Decoder(ResponsesRequest)
        self._items = msgspec.json.Decoder(list[InputItem])
        self.store = ResponseStore()

    def parse(self, owner: str, body: bytes) -> AskedResponse:
        """Raises RequestError, in part with names of chat fields (`translation.NAMES`)."""
        fields = read_json(self._body, body)
        self._parser.check_model(fields.model)
        earlier = self._conversation(owner, fields.previous_response_id)
        return AskedResponse(fields, earlier, self._parser.chat_fields(chat_request(fields, earlier)))

    def format(self, asked: AskedResponse, owner: str, request_id: str) -> ResponsesFormat:
        """What spells the answer, and keeps it when it is whole."""
        response = begun_response(f"resp_{request_id}", self._served_model, asked.fields, asked.parsed.service_tier)

        def keep(response: ResponseObject) -> None:
            if response.store:
                conversation = encode_json([*asked.earlier, *input_items(asked.fields), *response.output])
                self.store.put(owner, response.id, StoredResponse(encode_json(response), conversation))

        return ResponsesFormat(response, asked.parsed, self._tokenizer, keep)

    def _conversation(self, owner: str, response_id: str | None) -> list[InputItem]:
        """Up to the end of a stored answer."""
        if response_id is None:
            return []
        stored = self.store.get(owner, response_id)
        if stored is None:
            raise RequestError(
                f"previous_response_id: {bounded(response_id, 80)!r} is not stored here (any more); send its items as "
                "input",
                "previous_response_id",
                "previous_response_not_found",
            )
        return self._items.decode(stored.conversation)
