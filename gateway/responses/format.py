"""How /v1/responses spells an answer: whole, and as a stream of typed events."""

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus

from ...core.errors import RequestError
from ...core.request import FinishReason
from ...vocab.tokenizer import Tokenizer
from ..deltas import Delta, FinishedChoice, ScoredToken
from ..openai.answers import SSE_KEEP_ALIVE, TokenLogprob, Usage, encode_json
from ..openai.logprobs import TokenSpeller, chat_logprobs
from ..openai.request import ParsedRequest
from .answers import (
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputTokensDetails,
    ReasoningItem,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    sse_event,
)
from .fields import ResponsesRequest, TextConfig, TextFormat
from .output import Output


class ResponsesFormat:
    """An AnswerFormat for one answer. `done` is given the whole one before its client hears of it."""

    keep_alive = SSE_KEEP_ALIVE

    def __init__(
        self,
        response: ResponseObject,
        request: ParsedRequest,
        tokenizer: Tokenizer,
        done: Callable[[ResponseObject], None],
    ):
        """`response`: as it stands at the beginning."""
        self._response = response
        self._tells_logprobs = request.tells_logprobs
        self._tokenizer = tokenizer
        self._speller = TokenSpeller(tokenizer, skip_special_tokens=request.rules.skip_special_tokens)
        self._done = done
        self._output = Output(response.id.partition("_")[2])
        self._num_events = 0

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        (choice,) = choices
        self._output.push(choice.pieces, self._logprobs(choice.scores))
        self._finish(choice.finish_reason)
        self._complete(usage)
        return encode_json(self._response)

    def first(self, index: int, usage: Usage) -> bytes:
        return self._begin()

    def _begin(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return self._spell([ResponseEvent(type=kind, response=self._response) for kind in kinds])

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        return self._spell(self._output.push(delta.pieces, self._logprobs(delta.scores)))

    def last(self, delta: Delta, usage: Usage | None) -> bytes:
        return self._spell(self._finish(delta.finish_reason))

    def end(self, usage: Usage) -> bytes:
        self._complete(usage)
        return self._spell([ResponseEvent(type=f"response.{self._response.status}", response=self._response)])

    def failed(self, error: RequestError) -> bytes:
        begun = b"" if self._num_events else self._begin()
        self._response.status = "failed"
        is_overload = error.status == HTTPStatus.TOO_MANY_REQUESTS
        self._response.error = ResponseError("rate_limit_exceeded" if is_overload else "server_error", str(error))
        self._response.output = self._output.items
        return begun + self._spell([ResponseEvent(type="response.failed", response=self._response)])

    def _logprobs(self, scores: list[ScoredToken] | None) -> list[TokenLogprob]:
        return chat_logprobs(self._speller, scores).content if scores and self._tells_logprobs else []

    def _finish(self, finish_reason: str | None) -> list[ResponseEvent]:
        status: ItemStatus = "completed"
        if finish_reason == FinishReason.LENGTH:
            status = "incomplete"
            self._response.incomplete_details = IncompleteDetails("max_output_tokens")
        self._response.status = status
        return self._output.finish(status)

    def _complete(self, usage: Usage) -> None:
        response = self._response
        response.output = self._output.items
        response.completed_at = int(time.time()) if response.status == "completed" else None
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(self._num_reasoning_tokens()),
            usage.total_tokens,
        )
        self._done(response)

    def _num_reasoning_tokens(self) -> int:
        items = [item for item in self._output.items if isinstance(item, ReasoningItem)]
        return sum(len(self._tokenizer.encode(part.text)) for item in items for part in item.content)

    def _spell(self, events: list[ResponseEvent]) -> bytes:
        for number, event in enumerate(events, self._num_events):
            event.sequence_number = number
        self._num_events += len(events)
        return b"".join(map(sse_event, events))


def begun_response(response_id: str, model: str, fields: ResponsesRequest, tier: str | None) -> ResponseObject:
    """The answer to `fields` before anything is known of it."""
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        model=model,
        status="in_progress",
        output=[],
        instructions=fields.instructions,
        previous_response_id=fields.previous_response_id,
        metadata=fields.metadata or {},
        store=fields.store is not False,
        max_output_tokens=fields.max_output_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_logprobs=fields.top_logprobs or 0,
        text=TextConfig((fields.text or TextConfig()).format or TextFormat()),
        tools=fields.tools or [],
        tool_choice=fields.tool_choice or "auto",
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        service_tier=tier,
    )
