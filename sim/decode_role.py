"""SimDecodeRole: drives the production DecodeScheduler, SequenceBlocks and RadixCache against a device cost model.

The order of things is that of decode/role.py: first tokens of what was handed over, collect, admit, make room, plan,
launch. On a device that overlaps, a step is planned while the one in front of it runs. The scheduler is asked before
every step; what a step does to the sequences that decode is written down lazily (decode_batch.py).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..core.config import SchedulerConfig
from ..core.latency import time_per_output_token
from ..core.lifecycle import Event, Phase
from ..core.messages import AbortRequest, GenerateRequest, KVAbort, Message, NodeRef, RequestFailed, TokenChunk
from ..core.queueing import Waiting
from ..core.request import FinishReason
from ..core.sequence import Sequence
from ..core.step_cost import StepShape, chunk_products
from ..decode.pacing import DecodePacing
from ..decode.scheduler import DecodePlan, DecodeScheduler
from ..radix_cache.block_pool import BlockState
from ..worker.prefix_return import prefix_return_id
from .answers import Answers
from .decode_batch import BatchEntry, DecodeBatch, Gaps
from .handover import Handover
from .workbench import LaunchedWork, SimWorkbench

REPORT_INTERVAL_S = 5.0  # a long answer says at least this often that it goes on


@dataclass(frozen=True)
class _Step:
    """A forward pass, or only the sampling of first tokens after hand-overs (no prompts, no decodes)."""

    work: LaunchedWork
    has_decodes: bool
    prompts: list[tuple[BatchEntry, int]] = field(default_factory=list)
    sampled: list[BatchEntry] = field(default_factory=list)  # each gets the token after its prompt

    @property
    def is_pass(self) -> bool:
        return self.has_decodes or bool(self.prompts)


class SimDecodeRole:
    def __init__(self, bench: SimWorkbench, config: SchedulerConfig, answers: Answers):
        self.scheduler = DecodeScheduler(config)
        self.gaps = Gaps()
        self._bench = bench
        self._answers = answers
        self._entries: dict[str, BatchEntry] = {}
        self._batch = DecodeBatch(self.gaps, answers)
        self._arrived: list[BatchEntry] = []  # handed over, first token not yet sampled
        self._in_flight: deque[_Step] = deque()
        self._has_newcomer = False  # a request came that `_admit` has not seen
        self._pacing = DecodePacing(config, self.scheduler, bench.info.num_blocks * bench.info.block_size)

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_waiting_tokens(self) -> int:
        return self.scheduler.num_waiting_tokens

    @property
    def settings(self) -> dict[str, int]:
        return self._pacing.settings

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def step(self) -> Iterator[float]:
        """Yields the times until which the loop stands still."""
        self._launch_arrived()
        if not self._bench.overlaps:
            yield from self._collect_all()  # first tokens do not wait for the step behind them
        self._collect_done()
        is_ahead = sum(step.is_pass for step in self._in_flight) > 1
        if self._has_newcomer or not is_ahead:
            self._admit()
        if is_ahead:
            return
        if self._lacks_blocks():
            yield from self._collect_all()  # it may free blocks, and only who is not in flight can be preempted
            self.scheduler.make_room(self._missing_blocks, self._num_available_blocks, self._preempt)
        if self.scheduler.is_behind_batch(self._bench.clock.now, self._lacking_blocks):
            yield from self._collect_all()
            self.scheduler.make_way(self._bench.clock.now, self._lacking_blocks, self._preempt)
            self._admit()
        self._bench.tuned += self._pacing.update(self._bench.clock.now, self._bench.steps.cost)
        plan = self.scheduler.plan(self._find_room)
        room = self.scheduler.prompt_room(plan.num_decodes)
        self._bench.share.planned(plan.num_decodes, room, plan.num_prompt_tokens)
        if plan.decodes or plan.prompts:
            self._launch(plan)
        if not self._bench.overlaps:
            yield from self._collect_all()

    def _collect_done(self) -> None:
        while self._in_flight and self._in_flight[0].work.ends <= self._bench.clock.now:
            self._collect(self._in_flight.popleft())

    def _collect_all(self) -> Iterator[float]:
        if self._in_flight:
            yield self._in_flight[-1].work.ends
            self._collect_done()
            self._bench.report()

    def _launch_arrived(self) -> None:
        """The first token of every request whose hand-over is complete: only lm_head and sampling."""
        arrived = [entry for entry in self._arrived if self._is_live(entry)]
        self._arrived.clear()
        if not arrived:
            return
        self._in_flight.append(_Step(self._bench.launch_sampling(len(arrived)), False, sampled=arrived))
        for entry in arrived:
            entry.expect()

    def _launch(self, plan: DecodePlan) -> None:
        num_tokens, products = 0, 0.0
        prompts, sampled = [], []
        for sequence, count in plan.prompts:
            entry = self._entries[sequence.request_id]
            products += chunk_products(sequence.num_launched_tokens, count)
            num_tokens += count
            prompts.append((entry, count))
            sequence.launched(count)
            if sequence.num_uncomputed_tokens == 0:
                entry.expect()
                sampled.append(entry)
        num_decodes = len(plan.decodes)
        context = self._batch.launch(plan.decodes, self._entries) if num_decodes else 0
        shape = StepShape(num_tokens, products, num_decodes, context)
        self._in_flight.append(_Step(self._bench.launch(shape, len(prompts)), num_decodes > 0, prompts, sampled))
        self._pacing.launched(shape, self._bench.clock.now)

    def _collect(self, step: _Step) -> None:
        self._bench.collected(step.work.number)
        if step.has_decodes:
            num_tokens, ended = self._batch.collect(self._bench.clock.now)
            self._bench.num_tokens_generated += num_tokens
            for entry in ended:
                self._finish(entry)
        for entry, count in step.prompts:
            if self._is_live(entry):
                entry.sequence.collected(count)
                if entry in step.sampled:
                    entry.sequence.on(Event.PROMPT_COMPUTED)
                self._bench.blocks.publish(entry.sequence)
        for entry in step.sampled:
            if self._is_live(entry):
                self._take_token(entry)

    def _take_token(self, entry: BatchEntry) -> None:
        """The token after a prompt: the first one, or the next one of a sequence that was preempted."""
        now, index = self._bench.clock.now, entry.expected_output
        if entry.sequence.num_pending_tokens:  # else it has decoded since, and was written down by the batch
            entry.sequence.append(self._answers.token_ids(entry.request.sampling.seed, index, index + 1)[0])
        self._bench.num_tokens_generated += 1
        if entry.last_token_at is not None:
            self.gaps.add(now - entry.last_token_at, 1)
        else:
            entry.first_token_at = now
        entry.last_token_at = now
        if index + 1 == entry.num_outputs:
            self._finish(entry)
        elif index == entry.num_reported:
            self._tell_tokens(entry, index + 1)

    def _finish(self, entry: BatchEntry) -> None:
        self._batch.remove(entry, entry.num_prompt_tokens + entry.num_outputs)
        began = self._bench.clock.now if entry.first_token_at is None else entry.first_token_at
        tpot_s = time_per_output_token(0.0, self._bench.clock.now - began, entry.num_outputs)
        self._pacing.ended(entry.num_prompt_tokens, entry.num_outputs, tpot_s)
        self._end(entry)
        self._bench.report()  # before the client can come back with its next turn
        self._tell_tokens(entry, entry.num_outputs, FinishReason.LENGTH)

    def _tell_tokens(self, entry: BatchEntry, num_known: int, reason: FinishReason | None = None) -> None:
        start, entry.num_reported, entry.reported_at = entry.num_reported, num_known, self._bench.clock.now
        token_ids = self._answers.token_ids(entry.request.sampling.seed, start, num_known)
        self._bench.tell_gateway(
            TokenChunk(entry.sequence.request_id, 0, start, token_ids, reason, entry.num_cached_tokens)
        )

    # ---- blocks --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        self._has_newcomer = False
        while (sequence := self.scheduler.next_waiting(self._bench.clock.now)) is not None:
            entry = self._entries[sequence.request_id]
            is_remote = self._bench.network.knows(entry.prefill)
            if not is_remote and self._is_being_computed(sequence):
                return
            state = BlockState.RESERVED if is_remote else BlockState.PRIVATE
            if not self._bench.blocks.acquire(sequence, sequence.num_tokens + 1, state, self.scheduler.num_running):
                patience = self._bench.share.decode_patience
                self._bench.wait_for_blocks(patience, others_end=self.scheduler.has_any_that_advance)
                return
            self.scheduler.admit(sequence)
            if is_remote:
                self._receive(entry)
            else:
                sequence.on(Event.ADMITTED)
                self._count_cached(entry, sequence.num_computed_tokens)
        self._bench.share.decode_patience.waits_no_more()

    def _is_being_computed(self, sequence: Sequence) -> bool:
        others = (e.sequence for e in self._entries.values() if not self.scheduler.yields(e.sequence, sequence))
        return self._bench.blocks.is_being_computed(sequence, others)

    def _receive(self, entry: BatchEntry) -> None:
        sequence, request_id = entry.sequence, entry.sequence.request_id
        sequence.on(Event.GRANTED)
        if entry.num_returned_tokens:
            self._return_prefix(entry)
        handover, first_missing = self._bench.network.handover(request_id), sequence.num_computed_tokens

        def arrived() -> None:
            self._bench.put(lambda: self._handed_over(entry, handover))

        self._bench.network.later(lambda: handover.open_receiver(first_missing, arrived))

    def _return_prefix(self, entry: BatchEntry) -> None:
        sequence, num_tokens = entry.sequence, entry.num_returned_tokens
        assert entry.prefill is not None
        return_id = prefix_return_id(sequence.request_id)
        if sequence.num_computed_tokens < num_tokens:
            self._bench.tell(entry.prefill, KVAbort(return_id, "the prefix is no longer cached"))
            return
        handover = self._bench.network.handover(return_id)
        handover.open_sender(
            self._bench.network.wire(self._bench.ref), num_tokens, lambda: self._bench.network.drop_handover(return_id)
        )
        handover.computed(num_tokens, self._bench.clock.now)

    def _lacks_blocks(self) -> bool:
        return self.scheduler.num_missing_blocks(self._missing_blocks) > self._num_available_blocks()

    def _missing_blocks(self, sequence: Sequence) -> int:
        num_tokens, num_left = self._lengths(sequence)
        return self._bench.blocks.missing_blocks(sequence, num_tokens) if num_left > 0 else 0

    def _lacking_blocks(self, sequence: Sequence) -> int:
        return self._bench.blocks.lacking_blocks(sequence, sequence.num_tokens + 1, self.scheduler.num_running)

    def _num_available_blocks(self) -> int:
        return self._bench.blocks.cache.num_available

    def _find_room(self, sequence: Sequence) -> int:
        num_tokens, num_left = self._lengths(sequence)
        if num_left <= 0 or not self._bench.blocks.grow(sequence, num_tokens):
            return 0
        entry = self._entries[sequence.request_id]
        num_known = num_tokens - sequence.num_prompt_tokens - 1  # the newest one may be in flight
        if self._bench.clock.now - entry.reported_at > REPORT_INTERVAL_S and num_known > entry.num_reported:
            self._tell_tokens(entry, num_known)
        return min(num_left, self._bench.blocks.room(sequence) - num_tokens + 1)

    def _lengths(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens it has, pending ones included, and how many it may still have."""
        entry = self._entries[sequence.request_id]
        num_tokens = self._batch.num_tokens(entry)
        return num_tokens, entry.request.sampling.max_tokens - (num_tokens - sequence.num_prompt_tokens)

    def _preempt(self, sequence: Sequence) -> None:
        entry = self._entries[sequence.request_id]
        if entry.joined_step is not None:
            self._batch.remove(entry, self._batch.num_tokens(entry))
        self._bench.blocks.release(sequence)
        sequence.on(Event.PREEMPTED)
        entry.prefill = None

    # ---- messages and hand-overs ---------------------------------------------------------------------------------

    def handle(self, sender: NodeRef, message: Message) -> None:
        """Take a message; one that is another role's is ignored."""
        match message:
            case GenerateRequest():
                self._accept(message, sender)
            case AbortRequest(request_id=request_id) if request_id in self._entries:
                self._abort(self._entries[request_id])
            case KVAbort(request_id=request_id) if request_id in self._entries:
                self._handover_failed(self._entries[request_id])

    def _accept(self, message: GenerateRequest, gateway: NodeRef) -> None:
        request = message.request
        if self.scheduler.is_full:
            failed = RequestFailed(request.request_id, "this worker's queue is full", True)
            self._bench.tell(gateway, failed)
            return
        token_ids = request.prompt_token_ids + request.output_token_ids
        sequence = Sequence(request.request_id, request.namespace, token_ids, request.num_prompt_tokens)
        self._entries[request.request_id] = BatchEntry(
            request,
            sequence,
            message.prefill,
            min(message.num_returned_tokens, sequence.num_tokens - 1),
            min(self._answers.length(request.sampling.seed), request.sampling.max_tokens),
            len(request.output_token_ids),
            self._bench.clock.now,
        )
        num_uncached = self._bench.blocks.num_uncached_tokens(sequence)
        now = self._bench.clock.now
        self.scheduler.add(sequence, Waiting.of(request.request_id, request.urgency, now, num_uncached))
        self._has_newcomer = True

    def _handed_over(self, entry: BatchEntry, handover: Handover) -> None:
        if not self._is_live(entry):
            return
        sequence = entry.sequence
        sequence.on(Event.KV_COMMITTED)
        self._bench.network.drop_handover(prefix_return_id(sequence.request_id))
        self._bench.blocks.settle(sequence)
        sequence.num_computed_tokens = sequence.num_tokens
        self._bench.blocks.publish(sequence)
        self._count_cached(entry, handover.num_cached_tokens)
        self._arrived.append(entry)

    def _handover_failed(self, entry: BatchEntry) -> None:
        """The prompt is computed here: all of it that is not cached."""
        entry.prefill = None
        if entry.sequence.phase is not Phase.RECEIVING:
            return
        entry.sequence.on(Event.KV_FAILED)
        self._bench.network.drop_handover(entry.sequence.request_id)
        self._bench.network.drop_handover(prefix_return_id(entry.sequence.request_id))
        self._bench.blocks.settle(entry.sequence)
        self._count_cached(entry, 0)

    def _count_cached(self, entry: BatchEntry, num_tokens: int) -> None:
        if entry.num_cached_tokens is None:
            entry.num_cached_tokens = min(num_tokens, entry.request.num_prompt_tokens)

    def _abort(self, entry: BatchEntry) -> None:
        if entry.joined_step is not None:
            self._batch.remove(entry, self._batch.num_tokens(entry))
        self._end(entry)

    def _end(self, entry: BatchEntry) -> None:
        sequence = entry.sequence
        del self._entries[sequence.request_id]
        self.scheduler.remove(sequence)
        self._bench.network.drop_handover(sequence.request_id)
        self._bench.network.drop_handover(prefix_return_id(sequence.request_id))
        self._bench.blocks.release(sequence)
        sequence.on(Event.ENDED)

    def _is_live(self, entry: BatchEntry) -> bool:
        return self._entries.get(entry.sequence.request_id) is entry
