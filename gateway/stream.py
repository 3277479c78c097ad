"""Response: the generations of one HTTP request, as a whole answer or as server-sent events.

Each token is a chunk of its own, and chunks that are there together are written together. But the writer never runs
ahead of the client: it waits until what it wrote has been taken, and whatever tokens have come by then go out as one
chunk. When nothing is to be sent for a while, a comment keeps the connection open; while the request waits for its
turn, the comment says where it stands.
"""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

import msgspec

from ..core.errors import RequestError
from ..core.request import FinishReason, Urgency
from ..core.timeline import Station, Timeline
from ..vocab.tokenizer import Tokenizer
from .admission import Place
from .changed import Changed
from .choices import Choice, usage_of
from .deltas import Delta, PieceParser, PlainText
from .dispatcher import Dispatcher
from .event_sink import EventSink
from .generation import Generation, Unavailable
from .metrics import Metrics
from .openai.answers import Usage
from .openai.formats import AnswerFormat
from .openai.request import ParsedRequest
from .prompts import Prompt

_QUEUE_LOOK_S = 1.0  # a place in the queue that has changed is told this often at most

logger = logging.getLogger(__name__)


class Response:
    """Starts the generations of all prompts; `close` must be called, whatever happened, and aborts what still runs.

    Raises Unavailable from its constructor and its methods when the workers cannot serve it.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: Metrics,
        tokenizer: Tokenizer,
        answer: AnswerFormat,
        request: ParsedRequest,
        keep_alive_s: float,
    ):
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._answer = answer
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._changed = Changed()
        self.is_client_behind = False  # set by the writer
        self._choices: list[Choice] = []
        self._started_at = time.monotonic()
        self._num_running = 0  # choices
        self._first_place: Place | None = None
        self._told_position = 0
        self._told_at = 0.0
        self._bug: Exception | None = None  # met while text was written

    def start(
        self,
        prompts: Sequence[Prompt],
        namespace: str,
        timeline: Timeline,
        urgency: Urgency,
        new_parser: Callable[[Prompt], PieceParser] = lambda prompt: PlainText(),
    ) -> None:
        """Hands all prompts to the dispatcher. Choices are numbered prompt by prompt."""
        rules = self._request.rules
        for prompt in prompts:
            generations = self._generations(prompt, namespace, timeline, urgency)
            for generation in generations:
                index = len(self._choices)
                choice = Choice(index, generation, generations[0], self._tokenizer, rules, new_parser(prompt))
                self._choices.append(choice)
        self._num_running = len(self._choices)
        self._first_place = self._place()

    def _generations(
        self, prompt: Prompt, namespace: str, timeline: Timeline, urgency: Urgency
    ) -> Sequence[Generation]:
        num_sampled = self._request.num_sampled
        if prompt.sampling.max_tokens == 0 and prompt.num_prompt_logprobs is None:
            # The prompt alone is the answer: no worker is needed for it.
            ended = [
                Generation("", prompt, namespace, self._changed, timeline, self._started_at) for _ in range(num_sampled)
            ]
            for generation in ended:
                generation.finish(FinishReason.LENGTH)
            return ended
        return self._dispatcher.submit(
            prompt, namespace, timeline, self._changed, urgency=urgency, num_choices=num_sampled
        )

    def close(self) -> None:
        """Aborts the generations that have not ended and counts them all."""
        self._changed.close()
        seconds = time.monotonic() - self._started_at
        for choice in self._choices:
            generation = choice.generation
            self._dispatcher.cancel(generation, "the client left")
            reason = "error" if generation.error is not None else choice.finish_reason or FinishReason.ABORT
            is_first = generation is choice.lead  # the prompt of several choices counts once
            num_prompt_tokens = len(generation.prompt.token_ids) if is_first else 0
            num_cached_tokens = (generation.num_cached_tokens or 0) if is_first else 0
            self._metrics.answered(num_prompt_tokens, num_cached_tokens, seconds, reason)

    @property
    def timeline(self) -> Timeline:
        """Of the first choice."""
        return self._choices[0].generation.timeline

    @property
    def queue_headers(self) -> dict[str, str]:
        """Where it stood in the queue when it came (0: nowhere, it was sent out at once), and what was expected then.

        With how long it has waited, once that is over. Nothing when it was not even let into the queue.
        """
        if not self._choices:
            return {}
        place = self._first_place or Place(0, 0.0)
        headers = {"X-Queue-Position": str(place.position)}
        if place.start_s is not None:
            headers["X-Queue-Estimated-Start-Ms"] = str(round(place.start_s * 1e3))
        stamps = self.timeline.stamps
        if Station.DISPATCHED in stamps and Station.TOKENISED in stamps:
            waited_ns = stamps[Station.DISPATCHED] - stamps[Station.TOKENISED]
            headers["X-Queue-Waited-Ms"] = str(round(waited_ns / 1e6))
        return headers

    async def whole(self) -> bytes:
        """The answer in one piece, encoded."""
        async for _ in self._deltas(None):
            pass
        choices = [choice.finished() for choice in self._best()]
        numbered = [msgspec.structs.replace(choice, index=index) for index, choice in enumerate(choices)]
        return self._answer.whole(numbered, usage_of(self._choices))

    async def wait_for_start(self) -> None:
        """Returns when the first chunk is there, or after the keep-alive time: until then an error can still be a plain
        HTTP error.
        """
        deadline = time.monotonic() + self._keep_alive_s
        while not any(choice.generation.output_token_ids or choice.generation.ended for choice in self._choices):
            if not await self._wait(max(deadline - time.monotonic(), 0.0)):
                break
        self._raise_error()

    async def events(self, sink: EventSink) -> AsyncGenerator[bytes, None]:
        """Server-sent events to the end; what comes together is joined. An error becomes the last event.

        While the caller waits for the next one, tokens that are text and nothing else go to the sink.
        """
        if not self._request.continuous_usage:
            self._changed.take = partial(self._write_text, sink)
        try:
            if (place := self._place()) is not None:
                yield self._tell(place)
            async for deltas in self._deltas(self._keep_alive_s):
                if deltas:
                    yield self._spell(deltas[0]) if len(deltas) == 1 else b"".join(map(self._spell, deltas))
                elif (comment := self._comment()) is not None:
                    yield comment
        except Unavailable as error:
            yield self._answer.failed(error)
            return
        except Exception:  # a bug here: the client must still be told, or it takes the cut for the end
            logger.exception("a stream failed")
            yield self._answer.failed(RequestError("the gateway failed to spell this answer", status=500))
            return
        timing = f": timing {spell_timing(self.timeline)}\n\n".encode()
        yield timing + self._answer.end(usage_of(self._choices))

    def _write_text(self, sink: EventSink) -> bool:
        """Tells what is new where that is only text: False where it is not, or where the sink is not ready."""
        if not sink.is_ready:
            return False
        events = []
        try:
            for choice in self._choices:
                if not choice.is_only_text:
                    return False
                for delta in choice.texts():
                    events.append(self._answer.delta(delta, None))
        except Exception as error:  # nobody is here to tell the client: the stream is
            self._bug = error
            return False
        finally:
            if told := b"".join(events):  # a token that is no text yet need not be told
                sink.write(told)
        return True

    def _spell(self, delta: Delta) -> bytes:
        choice = self._choices[delta.index]
        usage = self._usage_so_far()
        if choice.started and delta.token_ids and delta.finish_reason is None:
            return self._answer.delta(delta, usage)
        parts = []
        if not choice.started:
            choice.started = True
            parts.append(self._answer.first(delta.index, usage_of(self._choices)))
        # A token without text of its own is progress too.
        if delta.token_ids or delta.pieces or delta.echo is not None:
            parts.append(self._answer.delta(delta, usage))
        if delta.finish_reason is not None:
            parts.append(self._answer.last(delta, usage))
        return b"".join(parts)

    def _usage_so_far(self) -> Usage | None:
        return usage_of(self._choices) if self._request.continuous_usage else None

    def _best(self) -> list[Choice]:
        """Of each prompt the choices to tell: all, or the likeliest of what was sampled, best first."""
        num_sampled, num_told = self._request.num_sampled, self._request.num_choices
        if num_sampled == num_told:
            return self._choices
        best = []
        for start in range(0, len(self._choices), num_sampled):
            of_prompt = self._choices[start : start + num_sampled]
            best += sorted(of_prompt, key=lambda choice: -choice.mean_logprob)[:num_told]
        return best

    def _place(self) -> Place | None:
        """In the queue; None as soon as one of the choices does not wait there any more."""
        places = [self._dispatcher.place(choice.generation) for choice in self._choices]
        known = [place for place in places if place is not None]
        return min(known, key=lambda place: place.position) if len(known) == len(places) else None

    def _comment(self) -> bytes | None:
        """What to say when there is nothing to say; None: not yet."""
        place, quiet_s = self._place(), time.monotonic() - self._told_at
        if place is None:
            return self._answer.keep_alive
        return self._tell(place) if place.position != self._told_position or quiet_s >= self._keep_alive_s else None

    def _tell(self, place: Place) -> bytes:
        self._told_position, self._told_at = place.position, time.monotonic()
        return spell_place(place)

    async def _deltas(self, keep_alive_s: float | None) -> AsyncGenerator[list[Delta], None]:
        """What is new in all choices, until all have ended; an empty list after `keep_alive_s` without anything, and
        sooner while it waits in the queue.
        """
        # Counts so far are those of all tokens taken in, so who asks for them gets one chunk of all that are there.
        has_one_each = keep_alive_s is not None and not self._request.continuous_usage
        was_dispatched = False
        while True:
            self._changed.clear()
            most_tokens = 1 if has_one_each and not self.is_client_behind else None
            deltas: list[Delta] = []
            for choice in self._choices:
                self._advance(choice, most_tokens, deltas)
            if deltas:
                yield deltas
            if not self._num_running:
                return
            self._raise_error()
            if self._changed.is_set():
                continue
            was_dispatched = was_dispatched or any(choice.generation.was_dispatched for choice in self._choices)
            pause_s = keep_alive_s
            if pause_s is not None and not was_dispatched:
                pause_s = min(pause_s, _QUEUE_LOOK_S)
            if not await self._changed.wait(pause_s):
                yield []

    def _advance(self, choice: Choice, most_tokens: int | None, deltas: list[Delta]) -> None:
        """Adds what is new of it to `deltas`."""
        generation = choice.generation
        if not choice.started and generation.output_token_ids and Station.FIRST_CHUNK not in generation.timeline.stamps:
            generation.timeline = generation.timeline.stamped(Station.FIRST_CHUNK)
            if generation is choice.lead:
                self._metrics.first_token(generation.timeline)
        for _ in range(max(choice.num_untold_tokens, 1)):
            if (delta := choice.advance(most_tokens)) is None:
                return
            deltas.append(delta)
            if delta.finish_reason is not None:
                self._num_running -= 1
                if delta.stopped_early:
                    self._dispatcher.cancel(generation, "a stop string was generated")
            if most_tokens is None:
                return

    def _raise_error(self) -> None:
        if self._bug is not None:
            raise self._bug
        for choice in self._choices:
            if choice.generation.error is not None and choice.finish_reason is None:
                raise choice.generation.error

    async def _wait(self, timeout_s: float | None) -> bool:
        """Waits for a change; False when there is none in time. The dispatcher bounds the wait without a timeout."""
        if not await self._changed.wait(timeout_s):
            return False
        self._changed.clear()
        return True


def spell_place(place: Place) -> bytes:
    """A place in the queue as an SSE comment."""
    start = "" if place.start_s is None else f", estimated start in {place.start_s:.1f} s"
    return f": queue position {place.position}{start}\n\n".encode()


def spell_timing(timeline: Timeline) -> str:
    """Stages in milliseconds, in the syntax of a Server-Timing header."""
    spans = [(f"{start}_to_{end}", duration_ns) for start, end, duration_ns in timeline.stages()]
    spans += [("handover_copy", timeline.copy_ns), ("handover_message", timeline.message_ns)]
    return ", ".join(f"{name};dur={duration_ns / 1e6:.3f}" for name, duration_ns in spans)
