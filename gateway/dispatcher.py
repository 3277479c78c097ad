"""Dispatcher: sends requests to workers and brings their tokens back; owns the table of requests.

A generation waits in the admission queue until a decode worker has credit for it. Then PrefillRequest and
GenerateRequest go out at once. Tokens come back numbered: repeats are dropped, a gap is an error. When the decode
worker dies, the request goes to another one together with the tokens it has so far; the same seed continues it with
the same tokens. Of several choices of one prompt, each that has tokens then goes alone, and those without any go
together once more. When the prefill worker dies nothing is done here: the decode worker computes the prompt itself.

Everything runs in the event loop's thread and nothing waits: time enters through `tick`. What happens comes in turns:
a worker that turns out to be gone while a turn sends something, and requests that can be sent out because of what a
turn did, are seen to at its end and not in its midst.
"""

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ..core.messages import (
    AbortRequest,
    Message,
    NodeRef,
    RequestFailed,
    Status,
    TokenChunk,
    TokenChunks,
    WorkerInfo,
)
from ..core.request import FinishReason, Urgency
from ..core.timeline import Station, Timeline
from .admission import BATCH_DELAY_S, Admission, Place
from .generation import USUAL, Attempt, Generation, Signal, Unavailable, together
from .membership import Membership
from .metrics import Metrics
from .placement import Placement
from .prompts import Prompt
from .router import Route
from .waiting_line import Refusal, WaitingLine

MAX_RETRIES = 2  # after a worker died or lost messages; refusals are bounded by the queue's time
RESTART_S = 5  # after which whoever is turned away by a server that stops may find it running again
STALL_S = 300.0  # an interactive request on a worker without any token for so long is given up

logger = logging.getLogger(__name__)


class Dispatcher:
    """`send` returns whether the message went out; it removes a worker that cannot be reached (`worker_left`)."""

    def __init__(
        self,
        membership: Membership,
        placement: Placement,
        admission: Admission,
        metrics: Metrics,
        send: Callable[[NodeRef, Message], bool],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._membership = membership
        self._placement = placement
        self._admission = admission
        self._metrics = metrics
        self._line = WaitingLine(admission, placement)
        self._send = send
        self._clock = clock
        self._generations: dict[str, Generation] = {}  # key |-> generation that has not ended
        self._attempts: dict[str, Attempt] = {}  # id on the wire |-> attempt that has not ended
        self._in_turn = False
        self._gone: deque[WorkerInfo] = deque()  # workers that left during this turn
        self.is_draining = False
        self.last_progress = self._clock()  # when any worker last sent a token

    # ---- what the HTTP side calls ---------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Generations on workers."""
        return sum(len(attempt.party) for attempt in self._attempts.values())

    @property
    def num_queued(self) -> int:
        """Generations that wait for credit or for another attempt."""
        return len(self._generations) - self.num_in_flight

    @property
    def num_batch_queued(self) -> int:
        """Those of them that are batch requests in the queue."""
        return self._line.num_batch

    def place(self, generation: Generation) -> Place | None:
        """Where it stands in the queue; None when it does not wait there."""
        return self._line.place(generation.party[0], self._clock())

    def require_open(self) -> None:
        """Raises Unavailable (503) when this gateway is draining."""
        if self.is_draining:
            raise Unavailable("this server is shutting down; ask another one", 503, retry_after=RESTART_S)

    def submit(
        self,
        prompt: Prompt,
        namespace: str,
        timeline: Timeline,
        changed: Signal,
        urgency: Urgency = USUAL,
        num_choices: int = 1,
        pinned: tuple[NodeRef, NodeRef | None] | None = None,
    ) -> list[Generation]:
        """Start `num_choices` answers to one prompt. Each must be given to `cancel` when it is not needed any more.

        Raises Unavailable: 429 when the queue is full, 503 when this gateway is draining. Generations that are refused
        for another reason have their `error` already.
        """
        now = self._clock()
        self.require_open()
        if pinned is None:
            self._make_room(urgency, now)
        party = [
            Generation(uuid.uuid4().hex, prompt, namespace, changed, timeline, now, urgency, pinned, choice)
            for choice in range(num_choices)
        ]
        together(party)
        self._generations.update((generation.key, generation) for generation in party)
        with self._turn():
            if pinned is None:
                self._line.enter(party[0])
            else:
                self._dispatch_pinned(party[0], pinned)
        if (refusal := self._line.hopeless(party[0], now)) is not None:
            self._refuse(refusal)
        return party

    def cancel(self, generation: Generation, reason: str) -> None:
        """Nobody wants more of it: its workers are told and its place is free. Harmless when it has ended."""
        if generation.key not in self._generations:
            return
        with self._turn():
            attempt = generation.attempt
            self._end(generation, reason, was_served=attempt is not None and attempt.prompt_done)
            if not generation.ended:
                self._finish(generation, FinishReason.ABORT)

    # ---- what the workers say -------------------------------------------------------------------------------------

    def handle(self, sender: NodeRef, body: Message) -> None:
        match body:
            case TokenChunks(chunks=chunks):
                self._on_chunks(sender, chunks)
            case TokenChunk():
                self._on_chunk(sender, body, self._clock())
            case RequestFailed():
                self._on_failed(sender, body)
            case Status(settings=settings):
                self._admission.credits.set_cap(sender, settings.get("cap"))

    def _on_chunks(self, sender: NodeRef, chunks: list[TokenChunk]) -> None:
        now = self._clock()
        for chunk in chunks:
            try:
                self._on_chunk(sender, chunk, now)
            except Exception:  # it may cost its request, never the others of that step
                logger.exception("tokens of %s could not be handled", sender.node_id)

    def _on_chunk(self, sender: NodeRef, chunk: TokenChunk, now: float) -> None:
        attempt = self._attempts.get(chunk.request_id)
        if attempt is None or attempt.route.decode != sender:
            if chunk.finish_reason is None:
                self._send(sender, AbortRequest(chunk.request_id, "the gateway does not know this request"))
            return
        generation = attempt.generation(chunk.choice)
        if generation is None:
            return  # it was cancelled: the worker will have been told
        num_known = len(generation.output_token_ids)
        if chunk.index > num_known or chunk.finish_reason is FinishReason.ABORT:
            self._placement.pause(sender, now)
            with self._turn():
                self._retry([generation], "the decode worker lost part of the answer")
            return
        last_progress = generation.last_progress
        self.last_progress = attempt.last_progress = generation.last_progress = now
        if not attempt.prompt_done:
            self._placement.first_token(attempt, chunk.timeline, now)
        if (num_new := generation.take(chunk)) > 0:
            self._metrics.tokens.arrived(num_new, now - last_progress if num_known else None)
            self._count_served(generation, num_new)
            self._admission.credits.generated(generation.key, num_new)
        if chunk.finish_reason is not None:
            with self._turn():
                for ended in list(attempt.party) if generation.is_prompt_alone else [generation]:
                    self._end(ended, was_served=True)
                    self._finish(ended, chunk.finish_reason)
        elif num_new:
            generation.changed.set()

    def _on_failed(self, sender: NodeRef, failed: RequestFailed) -> None:
        attempt = self._attempts.get(failed.request_id)
        if attempt is None:
            return
        if attempt.route.decode != sender:
            logger.debug("prefill of %s failed on %s: %s", failed.request_id, sender.node_id, failed.message)
            return  # the decode worker hears of it too and computes the prompt itself
        with self._turn():
            if failed.retryable and attempt.prompt_done:
                self._retry_all(attempt, f"the decode worker gave it up: {failed.message[:300]}")
            elif failed.retryable:
                logger.debug("%s refused %s: %s", sender.node_id, failed.request_id, failed.message)
                self._refused(attempt, sender)
            else:
                self._fail(attempt.party, Unavailable(f"the decode worker failed: {failed.message[:300]}", 500))

    def worker_joined(self, info: WorkerInfo) -> None:
        with self._turn():
            self._placement.worker_joined(info)

    def worker_left(self, info: WorkerInfo) -> None:
        with self._turn():
            self._gone.append(info)

    def tick(self, now: float) -> None:
        """Ends what has waited for too long."""
        with self._turn():
            for refusal in self._line.overdue(now):
                self._refuse(refusal)
            for attempt in list(self._attempts.values()):
                patience_s = BATCH_DELAY_S if attempt.is_batch else STALL_S
                if attempt.party and now - attempt.last_progress > patience_s:
                    error = Unavailable(f"no worker made progress on this request for {patience_s:g} s", 503)
                    self._fail(attempt.party, error)

    def stop(self, reason: str) -> None:
        """Fails everything that is left."""
        with self._turn():
            self._fail(self._generations.values(), Unavailable(reason, 503, retry_after=RESTART_S))

    # ---- dispatching ----------------------------------------------------------------------------------------------

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """What is done within belongs together; the outermost one ends by seeing to what follows from it."""
        if self._in_turn:
            yield
            return
        self._in_turn = True
        try:
            yield
            self._pump()
            while self._gone:
                self._without(self._gone.popleft())
                self._pump()
        finally:
            self._in_turn = False

    def _without(self, info: WorkerInfo) -> None:
        """A worker is gone: its requests go on elsewhere."""
        for attempt in list(self._attempts.values()):
            if attempt.route.decode == info.ref:
                self._retry_all(attempt, f"the decode worker {info.ref.node_id} is gone")
            elif attempt.party:
                self._placement.without_prefill(attempt, info.ref, self._clock())
        self._placement.worker_left(info)

    def _pump(self) -> None:
        """Dispatches from the head of the queue while there is credit."""
        now = self._clock()
        while (turn := self._line.next(now, (attempt.party[0] for attempt in self._attempts.values()))) is not None:
            if isinstance(turn, Refusal):
                self._refuse(turn)
                continue
            generation, route, num_missing = turn
            self._line.leave(generation)
            is_first = not generation.was_dispatched
            if not self._dispatch(generation, route, has_credit=True):
                self._line.enter(generation, returning=True)
            elif is_first:
                self._metrics.queued(now - generation.queued_at, is_batch=generation.urgency.is_batch)
                self._count_served(generation, num_missing)

    def _make_room(self, urgency: Urgency, now: float) -> None:
        """In the queue, for a newcomer. Raises Unavailable when there is none for it."""
        try:
            refusal = self._line.make_room(urgency, now)
        except Unavailable:
            self._metrics.refused("queue_full")
            raise
        if refusal is not None:
            self._refuse(refusal)

    def _dispatch_pinned(self, generation: Generation, pinned: tuple[NodeRef, NodeRef | None]) -> None:
        route = Route(pinned[0], pinned[1], len(generation.prompt.token_ids), 0)
        if not self._dispatch(generation, route, has_credit=False):
            self._fail(generation.party, Unavailable("a worker cannot be reached"))

    def _dispatch(self, first: Generation, route: Route, *, has_credit: bool) -> bool:
        """Sends its party out. False: a worker could not be reached (it has been removed), all is undone."""
        party, now = list(first.party), self._clock()
        timelines = [generation.timeline for generation in party]
        attempt = Attempt(uuid.uuid4().hex, route, has_credit, first.party, now)
        self._placement.take(first, attempt, now)
        for generation in party:
            generation.attempt, generation.last_progress = attempt, now
            generation.timeline = generation.timeline.stamped(Station.DISPATCHED)
        self._attempts[attempt.request_id] = attempt
        sent = route.prefill is None or self._send(route.prefill, first.prefill_request(attempt))
        if not (sent and self._send(route.decode, first.generate_request(attempt))):
            for generation, timeline in zip(party, timelines, strict=True):
                self._leave_attempt(generation, "its other worker cannot be reached")
                generation.timeline = timeline
            together(party)  # again
            return False
        first.changed.set()
        return True

    # ---- ends -----------------------------------------------------------------------------------------------------

    def _leave_attempt(self, generation: Generation, abort_reason: str | None, *, was_served: bool = False) -> None:
        """Gives back what it holds here; with a reason its workers are told to stop."""
        attempt, generation.attempt = generation.attempt, None
        if attempt is None:
            return
        generation.part()
        self._placement.give_back(generation, attempt, self._clock(), was_served=was_served)
        choice, refs = generation.choice if attempt.party else None, [attempt.route.decode]
        if not attempt.party:
            del self._attempts[attempt.request_id]
            if attempt.route.prefill is not None and not attempt.prompt_done:
                refs.append(attempt.route.prefill)
        for ref in refs:
            if abort_reason is not None and ref in self._membership.workers:
                self._send(ref, AbortRequest(attempt.request_id, abort_reason, choice))

    def _end(self, generation: Generation, abort_reason: str | None = None, *, was_served: bool = False) -> None:
        self._leave_attempt(generation, abort_reason, was_served=was_served)
        others = generation.part()
        self._line.leave(generation)
        if others and others[0] not in self._line:
            self._line.enter(others[0])  # they still wait, and it stood there for them
        self._generations.pop(generation.key, None)

    def _fail(self, generations: Iterable[Generation], error: Unavailable) -> None:
        for generation in reversed(list(generations)):  # the one that stands in the queue last
            self._end(generation, str(error))
            generation.fail(error)

    def _refuse(self, refusal: Refusal) -> None:
        self._metrics.refused(refusal.reason)
        self._fail(refusal.generation.party, refusal.error)

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        """It has its answer; what was cut off by its client counts as an answer of that length."""
        if generation.output_token_ids and generation.pinned is None:
            num_tokens, was_cut = len(generation.output_token_ids), reason is FinishReason.LENGTH
            self._placement.answered(num_tokens, self._clock(), was_cut=was_cut)
        generation.finish(reason)

    def _count_served(self, generation: Generation, num_tokens: int) -> None:
        if generation.pinned is None:
            urgency = generation.urgency
            self._admission.served(urgency.key, num_tokens, is_batch=urgency.is_batch)
            self._metrics.tokens.served(num_tokens, is_batch=urgency.is_batch)

    def _refused(self, attempt: Attempt, worker: NodeRef) -> None:
        """Its worker cannot take it now: back to the head of the queue, where it has waited since it came."""
        party = list(attempt.party)
        for generation in party:
            self._leave_attempt(generation, "it was refused")
        if party[0].pinned is not None:
            self._fail(party, Unavailable(f"{worker.node_id} takes no requests now"))
            return
        self._placement.pause(worker, self._clock())
        together(party)
        self._line.enter(party[0], returning=True)

    def _retry_all(self, attempt: Attempt, reason: str) -> None:
        fresh = [generation for generation in attempt.party if not generation.output_token_ids]
        begun = [generation for generation in attempt.party if generation.output_token_ids]
        for party in (*([generation] for generation in reversed(begun)), fresh):
            if party:
                self._retry(party, reason)

    def _retry(self, party: list[Generation], reason: str) -> None:
        """Another attempt, from the tokens there are; more than one has none."""
        for generation in party:
            self._leave_attempt(generation, reason)
        first = party[0]
        if (complete := first.complete_reason) is not None:
            for generation in party:
                self._end(generation)
                self._finish(generation, complete)
        elif first.pinned is not None or first.num_retries >= MAX_RETRIES:
            self._fail(party, Unavailable(f"{reason}; gave up after {first.num_retries + 1} attempts"))
        else:
            logger.debug("a request starts again with %d tokens: %s", len(first.output_token_ids), reason)
            self._metrics.retried()
            for generation in party:
                generation.num_retries += 1
                generation.queued_at = self._clock()
            together(party)
            self._line.enter(first, returning=True)
