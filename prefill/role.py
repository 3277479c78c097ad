"""PrefillRole: the life of a prompt on the worker that computes it.

    WAITING        PrefillRequest arrived; it owns one KVSender, which keeps the decode worker's lease alive
      | blocks for the whole prompt are there (matched prefix locked, the rest its own)
      |
      |-- decode knows more of it --> RECEIVING   decode returns the KV of an earlier answer; what comes is not
      |                                 |         computed, what fails to come is
      v                                 v
    COMPUTING      chunk by chunk, many prompts packed into one forward pass; each finished chunk is offered to the
      |            decode worker at once, so it travels while the next one computes
    HANDING_OVER   all computed and published in the radix tree; waits for the last pieces and the commit to leave
      | SendDone (or SendFailed, abort, lease): locks and blocks are given back, the KV stays behind as cache
    FINISHED

Prefill does not wait for decode's grant and knows nothing of sampling: what it hands on besides KV is the last
token's hidden state.
"""

import logging
from collections import deque

import numpy as np

from ..core.lifecycle import Event, Phase
from ..core.messages import AbortRequest, KVAbort, NodeRef, PrefillRequest
from ..core.queueing import Waiting
from ..core.sequence import Sequence
from ..core.step_cost import StepShape, chunk_products
from ..core.timeline import Station, Timeline
from ..engine.forward_batch import Chunk, build_forward_batch
from ..radix_cache.block_pool import BlockState
from ..transfer.channels import Incoming
from ..transfer.link import HandedOver, LinkEvent, ReceiveFailed, SendDone, SendFailed
from ..worker.membership import Membership
from ..worker.prefix_return import prefix_return_id, request_id_of
from ..worker.tuning_report import report_tuning
from ..worker.workbench import Workbench
from .entry import PrefillEntry
from .launched_step import LaunchedChunk, LaunchedStep
from .pacing import PrefillPacing
from .scheduler import PlannedChunk, PrefillScheduler

logger = logging.getLogger(__name__)


class PrefillRole:
    def __init__(self, bench: Workbench, membership: Membership):
        self._bench = bench
        self._membership = membership
        self._scheduler = PrefillScheduler(bench.config.prefill)
        self._pacing = PrefillPacing(bench.config.prefill, self._scheduler, overlaps=bench.engine.overlaps)
        self._entries: dict[str, PrefillEntry] = {}
        self._in_flight: deque[LaunchedStep] = deque()  # oldest first
        self._max_in_flight = 2 if bench.engine.overlaps else 1
        self._draining = False
        self.num_preemptions = 0  # a prompt that is being computed is never preempted

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return len(self._entries) - self._scheduler.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        return self._scheduler.num_waiting_tokens

    @property
    def settings(self) -> dict[str, int]:
        return self._pacing.settings

    # ---- the loop --------------------------------------------------------------------------------------------

    def step(self, now: float) -> bool:
        """Keep the device busy: one step runs, the next one is in its queue; hand on what the running one has done.

        Where the device is this processor (`overlaps` is false) a step is over once it is launched.
        """
        if self._bench.share.must_give_up(now):
            self._give_up_one()
        self._admit(now)
        report_tuning(self._pacing.update(now, self._bench.steps.cost), self._bench.channels)
        budget = self._bench.share.limited(self._scheduler.token_budget, self._bench.steps.cost)
        plan = self._scheduler.plan(budget) if len(self._in_flight) < self._max_in_flight else []
        if plan:
            self._launch(plan)
        worked = bool(self._in_flight)
        while self._in_flight and self._in_flight[0].progress.is_done():
            self._collect(self._in_flight.popleft(), now)
        if self._in_flight:
            self._offer_layers(self._in_flight[0], now)
        return worked

    def _launch(self, plan: list[PlannedChunk]) -> None:
        """One forward pass over the planned chunks, with the hidden states of the prompts that it completes."""
        chunks, parts, products = [], [], 0.0
        for planned in plan:
            entry = self._entries[planned.request_id]
            sequence = entry.sequence
            start, stop = sequence.num_launched_tokens, sequence.num_launched_tokens + planned.num_tokens
            chunks.append(Chunk(sequence.token_ids[start:stop], start, sequence.block_table, planned.is_last))
            products += chunk_products(start, planned.num_tokens)
            sequence.launched(planned.num_tokens)
            parts.append(LaunchedChunk(entry, planned.num_tokens, stop, planned.is_last))
        self._scheduler.launched(plan)
        number, runner = self._bench.blocks.step_launched(), self._bench.engine.runner
        self._bench.steps.launched(number, StepShape(sum(c.num_tokens for c in plan), products))
        hidden = runner.forward(build_forward_batch(chunks, self._bench.info.block_size))
        self._in_flight.append(LaunchedStep(parts, hidden, runner.progress, number))

    def _offer_layers(self, step: LaunchedStep, now: float) -> None:
        """The layers that the running step has behind it may travel while it computes the others."""
        num_layers = step.progress.layers_done()
        for part in step.chunks:
            if self._is_live(part.entry):
                self._bench.link.computing(part.entry.sequence.request_id, part.stop, num_layers, now)

    def _collect(self, step: LaunchedStep, now: float) -> None:
        """Publish and hand on what a step has computed. Who has ended meanwhile is skipped."""
        rows = iter(self._bench.engine.runner.to_host(step.hidden))  # one for each chunk that completed a prompt
        self._bench.steps.collected(step.number)
        self._bench.blocks.step_collected(step.number)
        for part in step.chunks:
            sequence = part.entry.sequence
            sequence.collected(part.num_tokens)
            hidden = next(rows) if part.is_last else None
            if not self._is_live(part.entry):
                continue
            if hidden is not None:
                self._hand_over(part.entry, hidden, now)
            else:
                self._bench.blocks.publish(sequence)
                self._bench.link.computed(sequence.request_id, sequence.num_computed_tokens, now)

    def _hand_over(self, entry: PrefillEntry, hidden: np.ndarray, now: float) -> None:
        sequence = entry.sequence
        entry.timeline = entry.timeline.stamped(Station.PREFILL_COMPUTED)
        sequence.on(Event.PROMPT_HANDED_ON)
        self._bench.blocks.publish(sequence)
        self._bench.link.computed(sequence.request_id, sequence.num_computed_tokens, now)
        self._bench.link.finish(sequence.request_id, hidden.tobytes(), entry.num_cached_tokens, entry.timeline, now)

    def _admit(self, now: float) -> None:
        """Let prompts start while there are blocks for them."""
        while (request_id := self._scheduler.next_waiting(now)) is not None:
            entry = self._entries[request_id]
            sequence = entry.sequence
            if self._is_being_computed(sequence):
                return
            if not self._acquire(entry):
                self._bench.share.prefill_patience.waits(now, others_end=not self._is_held_up(request_id))
                return
            entry.timeline = entry.timeline.stamped(Station.PREFILL_STARTED)
            self._scheduler.admit(request_id, 0)
            if entry.num_returned_tokens > sequence.num_computed_tokens:
                sequence.on(Event.GRANTED)
                self._bench.link.open_receiver(
                    prefix_return_id(request_id),
                    entry.decode,
                    sequence.block_table,
                    sequence.num_computed_tokens,
                    entry.num_returned_tokens,
                    now,
                )
            else:
                sequence.on(Event.ADMITTED)
                self._compute(entry, sequence.num_computed_tokens, now)
        self._bench.share.prefill_patience.waits_no_more()

    def _acquire(self, entry: PrefillEntry) -> bool:
        """Its blocks, if there are enough, and the decode role can spare them."""
        sequence, blocks, share = entry.sequence, self._bench.blocks, self._bench.share
        if share.has_both_roles:  # to know it costs a search
            num_held = sum(e.num_own_blocks for e in self._entries.values())
            if not share.may_hold(num_held, blocks.num_uncached_blocks(sequence)):
                return False
        if not blocks.acquire(sequence, sequence.num_tokens, BlockState.RESERVED):
            return False
        entry.num_own_blocks = len(sequence.block_table) - sequence.num_computed_tokens // self._bench.info.block_size
        return True

    def _is_held_up(self, request_id: str) -> bool:
        """Does its decode worker wait for it, while all that have blocks here wait for theirs?"""
        with_blocks = ((r, e.sequence.phase) for r, e in self._entries.items() if e.sequence.block_table)
        return self._bench.link.is_granted(request_id) and not any(
            phase is Phase.COMPUTING or self._bench.link.is_granted(r) for r, phase in with_blocks
        )

    def _give_up_one(self) -> None:
        """The newest prompt that waits for its decode worker: computed there, it costs time, but nobody's blocks."""
        waiting = [
            request_id
            for request_id, entry in self._entries.items()
            if entry.sequence.phase in (Phase.HANDING_OVER, Phase.RECEIVING)
            and not self._bench.link.is_granted(request_id)
        ]
        if waiting:
            logger.debug("hand-over of %s given up: its blocks are needed here", waiting[-1])
            self._end(waiting[-1], "its blocks were needed on the prefill worker")

    def _is_being_computed(self, sequence: Sequence) -> bool:
        """By another one that is not paused for the likes of it."""
        request_id = sequence.request_id
        others = (e.sequence for r, e in self._entries.items() if not self._scheduler.yields(r, request_id))
        return self._bench.blocks.is_being_computed(sequence, others)

    def _compute(self, entry: PrefillEntry, num_present_tokens: int, now: float) -> None:
        """The KV of the first tokens is there, from whichever cache: the rest is computed from the next step on."""
        sequence = entry.sequence
        self._bench.blocks.settle(sequence)
        sequence.num_computed_tokens = num_present_tokens
        entry.num_cached_tokens = num_present_tokens
        self._scheduler.resume(sequence.request_id, sequence.num_uncomputed_tokens)
        self._pacing.saw(entry.arrived_at, sequence.num_uncomputed_tokens, num_present_tokens)
        self._bench.link.computed(sequence.request_id, num_present_tokens, now)

    # ---- messages and events -----------------------------------------------------------------------------------

    def handle(self, incoming: Incoming, now: float) -> None:
        match incoming.body:
            case PrefillRequest() as request:
                self._accept(request, incoming.sender, now)
            case AbortRequest(request_id=request_id, reason=reason, choice=None) if request_id in self._entries:
                self._end(request_id, reason)

    def _accept(self, request: PrefillRequest, gateway: NodeRef, now: float) -> None:
        """Queue a prompt; one that cannot be served here is left to the decode worker, which can compute it itself."""
        if reason := self._why_not(request):
            logger.debug("refused %s: %s", request.request_id, reason)
            if self._membership.knows(request.decode):
                self._bench.tell(request.decode, KVAbort(request.request_id, reason))
            return
        sequence = Sequence(request.request_id, request.namespace, request.token_ids, len(request.token_ids))
        timeline = Timeline().stamped(Station.PREFILL_ARRIVED)
        num_returned = min(request.num_returned_tokens, sequence.num_tokens - 1)
        self._entries[request.request_id] = PrefillEntry(sequence, gateway, request.decode, timeline, num_returned, now)
        num_uncached = self._bench.blocks.num_uncached_tokens(sequence)
        self._scheduler.add(Waiting.of(request.request_id, request.urgency, now, num_uncached))
        # Open from the start, so that the decode worker gets signs of life while the prompt waits.
        self._bench.link.open_sender(request.request_id, request.decode, sequence.block_table, sequence.num_tokens, now)

    def _why_not(self, request: PrefillRequest) -> str | None:
        num_tokens = len(request.token_ids)
        if request.request_id in self._entries:
            return "a request with this id is already here"
        if num_tokens > self._bench.info.context_length:
            return f"the prompt has {num_tokens} tokens, this worker holds {self._bench.info.context_length}"
        if self._draining:
            return "this worker is leaving"
        if self._scheduler.is_full:
            return "this worker's queue is full"
        if not self._membership.knows(request.decode):
            return f"the decode worker {request.decode.node_id} is not known here"
        return None

    def on_link_event(self, event: LinkEvent, now: float) -> None:
        match event:
            case SendDone(request_id=request_id) if request_id in self._entries:
                self._end(request_id, None)
            case SendFailed(request_id=request_id, reason=reason) if request_id in self._entries:
                logger.debug("hand-over of %s failed: %s", request_id, reason)
                self._end(request_id, None)
            case HandedOver(request_id=return_id) if (entry := self._awaiting(return_id)) is not None:
                self._prefix_returned(entry, entry.num_returned_tokens, now)
            case ReceiveFailed(request_id=return_id, reason=reason, contiguous_tokens=num_tokens) if (
                entry := self._awaiting(return_id)
            ) is not None:
                logger.debug("%s: %s; computing the rest of the prefix here", return_id, reason)
                self._prefix_returned(entry, max(num_tokens, entry.sequence.num_computed_tokens), now)

    def _awaiting(self, return_id: str) -> PrefillEntry | None:
        """The entry whose prefix comes under this id, if there is one."""
        request_id = request_id_of(return_id)
        return None if request_id is None else self._entries.get(request_id)

    def _prefix_returned(self, entry: PrefillEntry, num_present_tokens: int, now: float) -> None:
        entry.sequence.on(Event.PREFIX_RETURNED)
        self._compute(entry, num_present_tokens, now)

    def gateway_lost(self, gateway: NodeRef) -> None:
        for request_id in [r for r, entry in self._entries.items() if entry.gateway == gateway]:
            self._end(request_id, "its gateway is gone")

    def drain(self) -> None:
        self._draining = True

    def _end(self, request_id: str, abort_reason: str | None) -> None:
        """Leave for FINISHED: free what the lifecycle row says this request owns here."""
        entry = self._entries.pop(request_id)
        self._scheduler.remove(request_id)
        if abort_reason is not None:
            self._bench.link.abort(request_id, abort_reason)
        self._bench.link.abort(prefix_return_id(request_id), abort_reason or "the request has ended")
        self._bench.blocks.release(entry.sequence)
        entry.sequence.on(Event.ENDED)

    def _is_live(self, entry: PrefillEntry) -> bool:
        return self._entries.get(entry.sequence.request_id) is entry
