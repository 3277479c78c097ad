"""Generation: one prompt on its way to one answer, as the gateway sees it.

Several answers to one prompt are as many generations, one for each choice, that go together as a *party*: the first of
them stands in the queue for all, one request is sent for all, so the prompt is computed once. From then on each ends by
itself. What has begun and must be sent again, because its worker died, goes alone.
"""

from dataclasses import dataclass, field
from typing import Protocol

from ..core.errors import RequestError
from ..core.messages import GenerateRequest, NodeRef, PrefillRequest, TokenChunk
from ..core.queueing import Waiting
from ..core.request import FinishReason, Request, TokenLogprobs, Urgency
from ..core.timeline import Station, Timeline
from .credits import Ask
from .prompts import Prompt
from .router import Route

USUAL = Urgency()


class Signal(Protocol):
    """What an asyncio.Event can do that is needed here."""

    def set(self) -> None: ...


class Unavailable(RequestError):
    """Not now: overloaded (429), or a worker that is needed is missing or failed (503, 500)."""

    def __init__(self, message: str, status: int = 503, retry_after: int | None = None):
        super().__init__(message, None, {429: "overloaded", 503: "unavailable"}.get(status, "worker_failed"), status)
        self.retry_after = retry_after
        self.headers: dict[str, str] = {}  # of the answer that tells of it


@dataclass
class Attempt:
    """The request as it was sent to workers once. Each attempt has an id of its own, minted here: what is left of an
    earlier one on some worker can never be taken for it. `party`: the choices in it that have not ended."""

    request_id: str
    route: Route
    has_credit: bool
    party: "list[Generation]"
    last_progress: float  # of any of them: where there are fewer places than choices, some wait until others have ended
    prompt_done: bool = False
    started: set[int] = field(default_factory=set)  # choices that have their first token

    def generation(self, choice: int) -> "Generation | None":
        """None when that choice has ended, or never was in it."""
        for generation in self.party:
            if generation.choice == choice:
                return generation
        return None

    @property
    def is_batch(self) -> bool:
        return self.party[0].urgency.is_batch


@dataclass(eq=False)
class Generation:
    """What is known of one answer. `changed` is set at each change; several generations of one response share it.

    `party` is the same list for all that wait together, or run in the same attempt.

    `queued_at` is when its present wait began: the queue's time limit counts from there. `pinned` names the workers
    to use (a probe): then there is no queue and no second attempt. `error` and `finish_reason` exclude each other;
    with either of them the generation has ended.
    """

    key: str
    prompt: Prompt
    namespace: str
    changed: Signal
    timeline: Timeline
    queued_at: float
    urgency: Urgency = USUAL
    pinned: tuple[NodeRef, NodeRef | None] | None = None
    choice: int = 0  # its number among the answers to its prompt
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one for each output token, when asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of every prompt token but the first, when asked for
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    error: Unavailable | None = None
    attempt: Attempt | None = None
    num_retries: int = 0
    last_progress: float = 0.0  # when it was sent out or brought tokens, whatever came last
    party: "list[Generation]" = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.party = self.party or [self]

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
        """What its party needs of a decode worker, as it stands."""
        num_generated = len(self.output_token_ids)
        num_tokens = len(self.prompt.token_ids) + num_generated
        max_tokens = self.prompt.sampling.max_tokens
        return Ask(num_tokens, num_generated, max_tokens, self.urgency.is_batch, len(self.party))

    def waiting(self, num_missing: int) -> Waiting:
        """Its entry in the queue. `num_missing`: tokens of its prompt that no cache has."""
        return Waiting.of(self.key, self.urgency, self.queued_at, num_missing)

    @property
    def complete_reason(self) -> FinishReason | None:
        """Why the tokens there are already make a whole answer, although nobody said so; None when they do not."""
        sampling = self.prompt.sampling
        if self.output_token_ids and self.output_token_ids[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.remaining_tokens <= 0 and not self.lacks_prompt_logprobs else None

    @property
    def is_prompt_alone(self) -> bool:
        """No token is wanted: all choices are the same, and the first one is asked for."""
        return self.prompt.sampling.max_tokens == 0

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """They are asked for and have not come: the decode worker must compute the whole prompt."""
        return self.prompt.num_prompt_logprobs is not None and self.prompt_logprobs is None

    def generate_request(self, attempt: Attempt) -> GenerateRequest:
        """What the decode worker is asked, for the whole party; after a death with the tokens that came before it."""
        prompt, party = self.prompt, [self] if self.is_prompt_alone else attempt.party
        request = Request(
            attempt.request_id,
            self.namespace,
            prompt.token_ids,
            prompt.sampling,
            output_token_ids=list(self.output_token_ids),
            urgency=self.urgency,
            choices=tuple(generation.choice for generation in party),
            num_prompt_logprobs=prompt.num_prompt_logprobs if self.lacks_prompt_logprobs else None,
        )
        return GenerateRequest(request, attempt.route.prefill, attempt.route.num_returned_tokens)

    def prefill_request(self, attempt: Attempt) -> PrefillRequest:
        """What the prefill worker is asked."""
        route = attempt.route
        return PrefillRequest(
            attempt.request_id, self.namespace, self.token_ids, route.decode, route.num_returned_tokens, self.urgency
        )

    def take(self, chunk: TokenChunk) -> int:
        """The next tokens of the present attempt, and what comes with the first of them. Returns how many are new: a
        worker may repeat some, and leaves none out.
        """
        assert self.attempt is not None
        if self.choice not in self.attempt.started:
            self.attempt.started.add(self.choice)
            self._take_first(chunk)
        if chunk.prompt_logprobs is not None:
            for generation in self.attempt.party:
                generation.prompt_logprobs = chunk.prompt_logprobs
        num_new = chunk.index + len(chunk.token_ids) - len(self.output_token_ids)
        if num_new <= 0:
            return 0
        self.output_token_ids += chunk.token_ids[-num_new:]
        if chunk.logprobs:
            self.logprobs += chunk.logprobs[-num_new:]
        return num_new

    def _take_first(self, chunk: TokenChunk) -> None:
        if chunk.timeline is not None and not self.output_token_ids:
            self.timeline = self.timeline.merged(chunk.timeline)
        cached, known = chunk.num_cached_tokens or 0, self.num_cached_tokens
        # After a second attempt, what either of them computed was computed.
        self.num_cached_tokens = cached if known is None else min(cached, known)

    def part(self) -> "list[Generation]":
        """It goes on alone; returns the rest of its party."""
        others = self.party
        others.remove(self)
        self.party = [self]
        return others

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.changed.set()

    def fail(self, error: Unavailable) -> None:
        self.error = error
        self.changed.set()


def together(generations: list[Generation]) -> None:
    """Makes these go together, the first at their head."""
    party = list(generations)
    for generation in party:
        generation.party = party
