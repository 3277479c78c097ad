"""DecodeRole: the life of a request on the worker that generates its tokens.

    WAITING     GenerateRequest arrived; it owns nothing
      | a place in the batch, a lock on the matched prefix, blocks for the rest of the prompt
      |
      |-- prefill worker named --> RECEIVING   blocks reserved, KVGrant sent; pieces are placed as they come
      |                              | commit: KV and the last hidden state are in; the first token is sampled at once
      |                              | failure (peer died, lease, abort, checksum): what is missing is computed here
      |-- none named ------------> COMPUTING   prompt chunks share the forward passes with everybody's decodes
      v
    RUNNING     one token a step; the other choices of the prompt have forked off (forks.py)
      |           the pool used up: the least urgent goes back to WAITING, its KV stays as cache
      | stop token, max_tokens, abort
    FINISHED    prompt and output stay behind in the radix tree; everything else is given back

A sequence that comes back from preemption, or from another worker that died, is nothing special: its uncomputed tokens
are computed, and counted randomness goes on at the same position.
"""

import logging
from collections import deque
from functools import partial

import torch

from ..core.lifecycle import Event, Phase
from ..core.messages import AbortRequest, GenerateRequest, NodeRef, RequestFailed, TokenChunk
from ..core.queueing import Waiting
from ..core.request import Request
from ..core.sequence import Sequence
from ..core.step_cost import StepShape
from ..core.timeline import Station
from ..radix_cache.block_pool import BlockState
from ..transfer.channels import Incoming
from ..transfer.link import HandedOver, LinkEvent, ReceiveFailed
from ..worker.membership import Membership
from ..worker.tuning_report import report_tuning
from ..worker.workbench import Workbench
from .entry import DecodeEntry
from .forks import Forks, entries_of
from .grammars import Grammars, compiler_of
from .handover import Handovers
from .launched_step import LaunchedStep
from .launching import StepLauncher
from .pacing import DecodePacing
from .refusal import Refusal, misfit
from .scheduler import DecodePlan, DecodeScheduler
from .token_outbox import TokenOutbox

logger = logging.getLogger(__name__)


class DecodeRole:
    def __init__(self, bench: Workbench, membership: Membership):
        self._bench = bench
        self._membership = membership
        self._scheduler = DecodeScheduler(bench.config.decode)
        self._handovers = Handovers(bench)
        pool_tokens = bench.info.num_blocks * bench.info.block_size
        self._pacing = DecodePacing(bench.config.decode, self._scheduler, pool_tokens)
        self._forks = Forks(bench)
        self._grammars = Grammars(partial(compiler_of, bench), bench.engine.model_config.eos_token_ids)
        self._launcher = StepLauncher(bench, self._grammars)
        self._outbox = TokenOutbox(bench.tell)
        self._entries: dict[str, DecodeEntry] = {}  # by the id of the sequence
        self._in_flight: deque[LaunchedStep] = deque()  # oldest first
        self._free_slots = list(range(bench.config.decode.max_running))  # of the device's newest tokens
        self._has_newcomer = False  # a request came that `_admit` has not seen
        self._draining = False

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting + self._forks.num_riding + self._grammars.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting_tokens(self) -> int:
        return self._scheduler.num_waiting_tokens

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    @property
    def settings(self) -> dict[str, int]:
        return self._pacing.settings

    # ---- the loop --------------------------------------------------------------------------------------------

    def step(self, now: float) -> bool:
        """Collect what is over and launch the next step behind the one that runs: the device never waits for the host.

        Nor does the host for the device, or a hand-over would move one ring of pieces a step. Where the device is this
        processor (`overlaps` is false) a step is over once it is launched, and collected at once.
        """
        self._take_compiled()
        self._launch_first_tokens()
        self._collect_done()
        is_ahead = sum(bool(step.chunks) for step in self._in_flight) > 1
        if self._has_newcomer or not is_ahead:
            self._admit(now)
        if is_ahead:
            return True
        self._make_room(now)
        report_tuning(self._pacing.update(now, self._bench.steps.cost), self._bench.channels)
        plan = self._scheduler.plan(self._find_room)
        room = self._scheduler.prompt_room(plan.num_decodes)
        self._bench.share.planned(plan.num_decodes, room, plan.num_prompt_tokens)
        if plan.chunks:
            self._launch(plan, now)
        worked = bool(self._in_flight)
        if not self._bench.engine.overlaps:
            self._collect_all()
        return worked or self._grammars.wait_briefly()

    def _launch_first_tokens(self) -> None:
        """Of all who have their prompt's KV from elsewhere: no forward pass, only lm_head and sampling."""
        complete = [(entry, hidden) for entry, hidden in self._forks.take_first_tokens() if self._is_live(entry)]
        if not complete:
            return
        number = self._bench.blocks.step_launched()
        self._bench.steps.launched(number, StepShape())
        self._in_flight.append(self._launcher.first_tokens(complete, number))
        if not self._bench.engine.overlaps:
            self._collect_all()

    def _launch(self, plan: DecodePlan, now: float) -> None:
        """One forward pass over decodes and prompt chunks, and a token for each sequence it brings up to date."""
        parts, shape = [], plan.shape
        for index, (sequence, num_tokens) in enumerate(plan.chunks):
            entry = self._entries[sequence.request_id]
            parts.append((entry, entry.chunk(num_tokens, is_decode=index < plan.num_decodes)))
            sequence.launched(num_tokens)
            if sequence.phase is Phase.COMPUTING:
                entry.stamp_once(Station.PREFILL_STARTED)
        number = self._bench.blocks.step_launched()
        self._bench.steps.launched(number, shape)
        self._pacing.launched(shape, now)
        keeps_hidden = any(e.sequence.num_uncomputed_tokens == 0 and self._forks.needs_hidden(e) for e, _ in parts)
        self._in_flight.append(self._launcher.forward(parts, plan.chunks, number, keeps_hidden=keeps_hidden))

    def _collect_done(self) -> None:
        while self._in_flight and self._in_flight[0].is_done():
            self._collect(self._in_flight.popleft())

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect(self._in_flight.popleft())

    def _collect(self, step: LaunchedStep) -> None:
        """Wait for a step, take its tokens and publish what prompts have gained. Who has ended meanwhile is skipped."""
        token_ids, logprobs = step.token_ids(), step.logprobs()
        self._bench.steps.collected(step.number)
        self._bench.blocks.step_collected(step.number)
        for scores in step.scores:
            scores.collect()
        for sequence, num_tokens in step.chunks:
            if sequence.phase is not Phase.FINISHED:  # what one that has ended keeps for forks stays as it is
                sequence.collected(num_tokens)
            if sequence.phase is Phase.COMPUTING:
                if sequence.request_id in step.complete:
                    sequence.on(Event.PROMPT_COMPUTED)
                    self._entries[sequence.request_id].stamp_once(Station.PREFILL_COMPUTED, Station.HANDED_OVER)
                self._bench.blocks.publish(sequence)
        if step.hidden is not None:
            rows = torch.from_numpy(self._bench.engine.runner.to_host(step.hidden))
            for entry, hidden in zip(step.sampled, rows, strict=True):
                self._prompt_done(entry, hidden.clone())
        for index, (entry, token_id) in enumerate(zip(step.sampled, token_ids, strict=True)):
            if not self._is_live(entry):
                continue
            if token_id is not None:
                self._emit(entry, entry.take(token_id, logprobs.get(index)))
            else:
                self._fail(entry.request.request_id, entry.why_no_token, retryable=False)
        for entry in filter(self._is_live, step.silent):
            self._emit(entry, entry.take_nothing())
        self._outbox.flush()

    def _emit(self, entry: DecodeEntry, chunk: TokenChunk) -> None:
        self._bench.counters["num_tokens_generated"] += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            num_tokens = entry.sequence.num_known_output_tokens
            self._pacing.ended(entry.num_own_prompt_tokens, num_tokens, entry.time_per_output_token())
            self._end(entry)
            self._bench.reporter.report()  # before the client can come back with its next turn
        self._outbox.add(entry.gateway, chunk)

    # ---- blocks ------------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Let requests join while there is a place and there are blocks for them; forks get their first token."""
        self._admit_next(now)
        self._launch_first_tokens()

    def _admit_next(self, now: float) -> None:
        self._has_newcomer = False
        while (sequence := self._scheduler.next_waiting(now)) is not None:
            entry = self._entries[sequence.request_id]
            has_source = self._forks.source(entry) is not None or self._membership.knows(entry.prefill)
            if not has_source and self._is_being_computed(sequence):
                return
            if not self._join(entry, now):
                self._bench.share.decode_patience.waits(now, others_end=self._scheduler.has_any_that_advance)
                return
            self._scheduler.admit(sequence)
            entry.feedback_slot = self._free_slots.pop()
        self._bench.share.decode_patience.waits_no_more()

    def _join(self, entry: DecodeEntry, now: float) -> bool:
        """False when there are no blocks for it, even without those that are kept for forks."""
        while not self._find_blocks(entry, now):
            if not self._forks.give_up():
                return False
        return True

    def _find_blocks(self, entry: DecodeEntry, now: float) -> bool:
        sequence, headroom = entry.sequence, self._scheduler.num_running
        if (source := self._forks.source(entry)) is not None:
            return self._forks.fork(source, entry, headroom)
        is_remote = self._membership.knows(entry.prefill)
        state = BlockState.RESERVED if is_remote else BlockState.PRIVATE
        if not self._bench.blocks.acquire(sequence, sequence.num_tokens + 1, state, headroom):
            return False
        self._forks.computes_itself(entry)
        if is_remote:
            self._handovers.open(entry, now)
        else:
            sequence.on(Event.ADMITTED)
            entry.count_cached(sequence.num_computed_tokens)
        return True

    def _is_being_computed(self, sequence: Sequence) -> bool:
        """By another one that does not yield to it."""
        others = (e.sequence for e in self._entries.values() if not self._scheduler.yields(e.sequence, sequence))
        return self._bench.blocks.is_being_computed(sequence, others)

    def _make_room(self, now: float) -> None:
        """Preempt those whose blocks others need more: when nothing is in flight, so the blocks are free at once."""
        if self._lacks_blocks():
            self._collect_all()  # it may free blocks too
            while self._lacks_blocks() and self._forks.give_up():
                continue
            self._scheduler.make_room(self._missing_blocks, self._num_available_blocks, self._preempt)
        if self._scheduler.is_behind_batch(now, self._lacking_blocks):
            self._collect_all()
            self._scheduler.make_way(now, self._lacking_blocks, self._preempt)
            self._admit(now)

    def _lacks_blocks(self) -> bool:
        return self._scheduler.num_missing_blocks(self._missing_blocks) > self._num_available_blocks()

    def _missing_blocks(self, sequence: Sequence) -> int:
        if self._entries[sequence.request_id].has_all_tokens:
            return 0
        return self._bench.blocks.missing_blocks(sequence, sequence.num_tokens)

    def _lacking_blocks(self, sequence: Sequence) -> int:
        return self._bench.blocks.lacking_blocks(sequence, sequence.num_tokens + 1, self._scheduler.num_running)

    def _num_available_blocks(self) -> int:
        return self._bench.cache.num_available

    def _find_room(self, sequence: Sequence) -> int:
        """Blocks for the newest token's KV; for how many tokens there is room then and the request may still have.

        0 as well when its last token is on the way, or one that the next depends on: there is no next step so far.
        """
        entry = self._entries[sequence.request_id]
        if entry.has_all_tokens or entry.awaits_token or not self._bench.blocks.grow(sequence, sequence.num_tokens):
            return 0
        if entry.request.sampling.needs_known_tokens:
            return 1
        num_left = entry.request.sampling.max_tokens - sequence.num_output_tokens
        return min(num_left, self._bench.blocks.room(sequence) - sequence.num_tokens + 1)

    def _preempt(self, sequence: Sequence) -> None:
        logger.debug("preempted %s with %d tokens", sequence.request_id, sequence.num_tokens)
        self._bench.blocks.release(sequence)
        sequence.on(Event.PREEMPTED)
        entry = self._entries[sequence.request_id]
        entry.prefill = None  # what is missing is computed here
        self._free_slot(entry)

    def _free_slot(self, entry: DecodeEntry) -> None:
        """The next owner's first token is written behind whatever an old step in flight still writes there."""
        if entry.feedback_slot >= 0:
            self._free_slots.append(entry.feedback_slot)
            entry.feedback_slot = -1

    # ---- messages and events -----------------------------------------------------------------------------------

    def handle(self, incoming: Incoming, now: float) -> None:
        match incoming.body:
            case GenerateRequest() as message:
                self._accept(message, incoming.sender, now)
            case AbortRequest(request_id=request_id, reason=reason, choice=None):
                self._abort(request_id, reason)
            case AbortRequest(request_id=request_id, reason=reason, choice=int(choice)):
                self._abort_choice(request_id, choice, reason)

    def _accept(self, message: GenerateRequest, gateway: NodeRef, now: float) -> None:
        request = message.request
        if refusal := self._why_not(request):
            self._bench.tell(gateway, RequestFailed(request.request_id, refusal.message, refusal.retryable))
            return
        lead, *riders = entries_of(message, gateway)
        self._entries.update((entry.sequence.request_id, entry) for entry in (lead, *riders))
        num_uncached = self._bench.blocks.num_uncached_tokens(lead.sequence)
        place = Waiting.of(request.request_id, request.urgency, now, num_uncached)
        self._forks.add(lead, riders, place)
        if request.sampling.grammar:
            self._grammars.start([lead, *riders], place)
        else:
            self._scheduler.add(lead.sequence, place)
            self._has_newcomer = True

    def _take_compiled(self) -> None:
        """Requests whose grammar is compiled wait like all others from now on."""
        for compiled in self._grammars.take_compiled():
            lead = compiled.entries[0]
            if self._is_live(lead) and compiled.error:
                self._fail(lead.request.request_id, compiled.error, retryable=False)
            elif self._is_live(lead):
                self._scheduler.add(lead.sequence, compiled.place)
                self._has_newcomer = True

    def _why_not(self, request: Request) -> Refusal | None:
        if request.request_id in self._forks:
            return Refusal("a request with this id is already here", False)
        if self._draining:
            return Refusal("this worker is leaving", True)
        if self._scheduler.is_full:
            return Refusal("this worker's queue is full", True)
        return misfit(request, self._bench.info.context_length)

    def on_link_event(self, event: LinkEvent, now: float) -> None:
        match event:
            case HandedOver(request_id=request_id, commit=commit, timeline=timeline) if request_id in self._entries:
                entry = self._entries[request_id]
                if (hidden := self._handovers.commit(entry, commit, timeline)) is not None:
                    self._forks.first_token(entry, hidden)
                    self._prompt_done(entry, hidden)
            case ReceiveFailed(request_id=r, reason=reason, contiguous_tokens=n) if r in self._entries:
                self._handovers.fail(self._entries[r], reason, n)

    def gateway_lost(self, gateway: NodeRef) -> None:
        for request_id in self._forks.requests_of(gateway):
            # Should it only have been stopped for a while, it must not wait for tokens that will not come.
            self._fail(request_id, "the gateway was silent for too long", retryable=True)

    def drain(self) -> None:
        self._draining = True

    def _prompt_done(self, entry: DecodeEntry, hidden: torch.Tensor) -> None:
        """The other choices of a prompt that is complete here can join."""
        for rider, place in reversed(self._forks.prompt_done(entry, hidden)):
            self._scheduler.add(rider.sequence, place, returning=True)  # who came back last is next
            self._has_newcomer = True

    def _fail(self, request_id: str, message: str, *, retryable: bool) -> None:
        """All that is left of its choices, with word to the gateway."""
        self._outbox.flush()  # what came before it
        self._bench.tell(self._forks.gateway(request_id), RequestFailed(request_id, message, retryable))
        self._abort(request_id, message)

    def _abort(self, request_id: str, reason: str) -> None:
        """All that is left of its choices. Nothing happens when it is not here."""
        for entry in self._forks.entries(request_id):
            self._handovers.abort(entry, reason)
            self._end(entry)

    def _abort_choice(self, request_id: str, choice: int, reason: str) -> None:
        entry = self._forks.entry(request_id, choice)
        if entry is not None and entry.sequence.num_pending_tokens and self._forks.needs_hidden(entry):
            self._collect_all()  # its first token is being sampled: the prompt is complete then
            entry = self._forks.entry(request_id, choice)
        if entry is not None:
            entry = self._forks.who_goes_for(entry)
            self._handovers.abort(entry, reason)
            self._end(entry)

    def _end(self, entry: DecodeEntry) -> None:
        """Leave for FINISHED: free what the lifecycle row says this choice owns here."""
        del self._entries[entry.sequence.request_id]
        self._scheduler.remove(entry.sequence)
        self._handovers.close(entry)
        self._forks.end(entry)
        self._free_slot(entry)
        entry.sequence.on(Event.ENDED)

    def _is_live(self, entry: DecodeEntry) -> bool:
        return self._entries.get(entry.sequence.request_id) is entry
