"""Responses: bodies of /v1/responses in, answers to them out, and what is kept in between. No I/O."""

from collections.abc import Sequence

import msgspec

from ...core.errors import RequestError
from ...vocab.tokenizer import Tokenizer
from ..openai.answers import encode_json
from ..openai.json_errors import bounded, read_json
from ..openai.parser import RequestParser
from ..openai.request import ParsedRequest
from ..paging import Page
from .answers import InputItemList, ResponseObject
from .fields import InputItem, ResponsesRequest
from .format import ResponsesFormat, begun_response
from .item_list import listed, with_ids
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
        if isinstance(fields.input, list):
            fields.input = [self._resolved(owner, item, f"input[{i}]") for i, item in enumerate(fields.input)]
        earlier = self._conversation(owner, fields.previous_response_id)
        return AskedResponse(fields, earlier, self._parser.chat_fields(chat_request(fields, earlier)))

    def format(self, asked: AskedResponse, owner: str, request_id: str) -> ResponsesFormat:
        """What spells the answer, and keeps it when it is whole."""
        response = begun_response(f"resp_{request_id}", self._served_model, asked.fields, asked.parsed.service_tier)

        def keep(response: ResponseObject) -> None:
            if response.store:
                own = with_ids(input_items(asked.fields), response.id)
                conversation = encode_json([*asked.earlier, *own, *response.output])
                item_ids = tuple(item.id for item in (*own, *response.output) if item.id)
                num_input_items = len(asked.earlier) + len(own)
                stored = StoredResponse(encode_json(response), conversation, num_input_items, item_ids)
                self.store.put(owner, response.id, stored)

        return ResponsesFormat(response, asked.parsed, self._tokenizer, keep)

    def input_items(self, stored: StoredResponse, page: Page) -> InputItemList:
        """What it answered. Raises RequestError for a page that is none."""
        return listed(self._items.decode(stored.conversation)[: stored.num_input_items], page)

    def _resolved(self, owner: str, item: InputItem, at: str) -> InputItem:
        """The item itself, or the stored one that it refers to."""
        if item.type != "item_reference":
            return item
        stored = self.store.holder(owner, item.id or "")
        for other in self._items.decode(stored.conversation) if stored is not None else ():
            if other.id == item.id:
                return other
        raise RequestError(
            f"{at}.id: {bounded(item.id or '', 80)!r} is not stored here (any more); send the item itself",
            f"{at}.id",
            "item_not_found",
        )

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
