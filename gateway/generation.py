"""Generation: one prompt on its way to one answer, as the gateway sees it."""

import asyncio
from dataclasses import dataclass, field

from ..core.errors import RequestError
from ..core.messages import GenerateRequest, NodeRef, PrefillRequest, TokenChunk
from ..core.queueing import Waiting
from ..core.request import FinishReason, Request, Urgency
from ..core.timeline import Station, Timeline
from .credits import Ask
from .prompts import Prompt
from .router import Route

USUAL = Urgency()


class Unavailable(RequestError):
    """Not now: overloaded (429), or a worker that is needed is missing or failed (503, 500)."""

    def __init__(self, message: str, status: int = 503, retry_after: int | None = None):
        super().__init__(message, None, {429: "overloaded", 503: "unavailable"}.get(status, "worker_failed"), status)
        self.retry_after = retry_after
        self.headers: dict[str, str] = {}  # of the answer that tells of it


@dataclass
class Attempt:
    """The request as it was sent to workers once. Each attempt has an id of its own, minted here: what is left of an
    earlier one on some worker can never be taken for it."""

    request_id: str
    route: Route
    has_credit: bool
    prompt_done: bool = False


@dataclass
class Generation:
    """What is known of one answer. `changed` is set at each change; several generations of one response share it.

    `queued_at` is when its present wait began: the queue's time limit counts from there. `pinned` names the workers
    to use (a probe): then there is no queue and no second attempt. `error` and `finish_reason` exclude each other;
    with either of them the generation has ended.
    """

    key: str
    prompt: Prompt
    namespace: str
    changed: asyncio.Event
    timeline: Timeline
    queued_at: float
    urgency: Urgency = USUAL
    pinned: tuple[NodeRef, NodeRef | None] | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    error: Unavailable | None = None
    attempt: Attempt | None = None
    num_retries: int = 0
    last_progress: float = 0.0  # when it was sent out or brought tokens, whatever came last

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def was_dispatched(self) -> bool:
        return Station.DISPATCHED in self.timeline.stamps

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far: what a worker needs the KV of before the next token."""
        return self.prompt.token_ids + self.output_token_ids

    @property
    def remaining_tokens(self) -> int:
        return self.prompt.sampling.max_tokens - len(self.output_token_ids)

    @property
    def ask(self) -> Ask:
        """What it needs of a decode worker, as it stands."""
        num_generated = len(self.output_token_ids)
        num_tokens = len(self.prompt.token_ids) + num_generated
        return Ask(num_tokens, num_generated, self.prompt.sampling.max_tokens, self.urgency.is_batch)

    def waiting(self, num_missing: int) -> Waiting:
        """Its entry in the queue. `num_missing`: tokens of its prompt that no cache has."""
        return Waiting.of(self.key, self.urgency, self.queued_at, num_missing)

    @property
    def complete_reason(self) -> FinishReason | None:
        """Why the tokens there are already make a whole answer, although nobody said so; None when they do not."""
        sampling = self.prompt.sampling
        if self.output_token_ids and self.output_token_ids[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.remaining_tokens <= 0 else None

    def generate_request(self, attempt: Attempt) -> GenerateRequest:
        """What the decode worker is asked; after a death with the tokens that came before it."""
        prompt, output = self.prompt, list(self.output_token_ids)
        request = Request(attempt.request_id, self.namespace, prompt.token_ids, prompt.sampling, output, self.urgency)
        return GenerateRequest(request, attempt.route.prefill, attempt.route.num_returned_tokens)

    def prefill_request(self, attempt: Attempt) -> PrefillRequest:
        """What the prefill worker is asked."""
        route = attempt.route
        return PrefillRequest(
            attempt.request_id, self.namespace, self.token_ids, route.decode, route.num_returned_tokens, self.urgency
        )

    def started(self, chunk: TokenChunk) -> None:
        """Takes what comes with the first chunk of an attempt."""
        if chunk.timeline is not None and not self.output_token_ids:
            self.timeline = self.timeline.merged(chunk.timeline)
        cached, known = chunk.num_cached_tokens or 0, self.num_cached_tokens
        # After a second attempt, what either of them computed was computed.
        self.num_cached_tokens = cached if known is None else min(cached, known)

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.changed.set()

    def fail(self, error: Unavailable) -> None:
        self.error = error
        self.changed.set()
