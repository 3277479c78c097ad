"""SimPrefillRole: drives the production PrefillScheduler, SequenceBlocks and RadixCache against a device cost model.

The order of things is that of prefill/role.py: admit, plan, launch (one step runs, the next one is in the device's
queue), collect, publish, hand on. What is over is collected first here, where a turn comes at the end of a step and not
all the time. KV is a number of bytes.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..core.config import SchedulerConfig
from ..core.lifecycle import Event, Phase
from ..core.messages import AbortRequest, KVAbort, Message, NodeRef, PrefillRequest
from ..core.queueing import Waiting
from ..core.sequence import Sequence
from ..core.step_cost import StepShape, chunk_products
from ..prefill.pacing import PrefillPacing
from ..prefill.scheduler import PlannedChunk, PrefillScheduler
from ..radix_cache.block_pool import BlockState
from ..worker.prefix_return import prefix_return_id, request_id_of
from .workbench import LaunchedWork, SimWorkbench


@dataclass
class _Entry:
    sequence: Sequence
    decode: NodeRef
    num_returned_tokens: int
    arrived_at: float
    num_cached_tokens: int = 0
    num_own_blocks: int = 0


@dataclass(frozen=True)
class _Step:
    chunks: list[tuple[_Entry, PlannedChunk]]
    work: LaunchedWork


class SimPrefillRole:
    def __init__(self, bench: SimWorkbench, config: SchedulerConfig):
        self.scheduler = PrefillScheduler(config)
        self._bench = bench
        self._pacing = PrefillPacing(config, self.scheduler, overlaps=bench.overlaps)
        self._entries: dict[str, _Entry] = {}
        self._in_flight: deque[_Step] = deque()
        self._max_in_flight = 2 if bench.overlaps else 1

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return len(self._entries) - self.scheduler.num_waiting

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
        """Yields when the step ends, where the loop stands still meanwhile."""
        self._collect_done()
        if self._bench.share.must_give_up(self._bench.clock.now):
            self._give_up_one()
        self._admit()
        self._bench.tuned += self._pacing.update(self._bench.clock.now, self._bench.steps.cost)
        budget = self._bench.share.limited(self.scheduler.token_budget, self._bench.steps.cost)
        plan = self.scheduler.plan(budget) if len(self._in_flight) < self._max_in_flight else []
        if plan:
            self._launch(plan)
            if not self._bench.overlaps:
                yield self._in_flight[-1].work.ends
                self._collect_done()

    def _collect_done(self) -> None:
        while self._in_flight and self._in_flight[0].work.ends <= self._bench.clock.now:
            self._collect(self._in_flight.popleft())

    def _launch(self, plan: list[PlannedChunk]) -> None:
        num_tokens, products = 0, 0.0
        chunks = []
        for planned in plan:
            entry = self._entries[planned.request_id]
            products += chunk_products(entry.sequence.num_launched_tokens, planned.num_tokens)
            num_tokens += planned.num_tokens
            entry.sequence.launched(planned.num_tokens)
            chunks.append((entry, planned))
        self.scheduler.launched(plan)
        shape = StepShape(num_tokens, products)
        self._in_flight.append(_Step(chunks, self._bench.launch(shape, len(plan))))

    def _collect(self, step: _Step) -> None:
        self._bench.collected(step.work.number)
        for entry, planned in step.chunks:
            sequence = entry.sequence
            sequence.collected(planned.num_tokens)
            if self._entries.get(sequence.request_id) is not entry:
                continue
            if planned.is_last:
                sequence.on(Event.PROMPT_HANDED_ON)
            self._bench.blocks.publish(sequence)
            self._bench.network.handover(sequence.request_id).computed(sequence.num_computed_tokens, step.work.began)

    def _admit(self) -> None:
        while (request_id := self.scheduler.next_waiting(self._bench.clock.now)) is not None:
            entry = self._entries[request_id]
            sequence = entry.sequence
            others = (e.sequence for r, e in self._entries.items() if not self.scheduler.yields(r, request_id))
            if self._bench.blocks.is_being_computed(sequence, others):
                return
            if not self._acquire(entry):
                patience = self._bench.share.prefill_patience
                self._bench.wait_for_blocks(patience, others_end=not self._is_held_up(request_id))
                return
            self.scheduler.admit(request_id, 0)
            if entry.num_returned_tokens > sequence.num_computed_tokens:
                sequence.on(Event.GRANTED)
                self._receive_prefix(entry)
            else:
                sequence.on(Event.ADMITTED)
                self._compute(entry, sequence.num_computed_tokens)
        self._bench.share.prefill_patience.waits_no_more()

    def _is_held_up(self, request_id: str) -> bool:
        """As in prefill/role.py."""
        with_blocks = ((r, e.sequence.phase) for r, e in self._entries.items() if e.sequence.block_table)
        return self._is_granted(request_id) and not any(
            phase is Phase.COMPUTING or self._is_granted(r) for r, phase in with_blocks
        )

    def _is_granted(self, request_id: str) -> bool:
        return self._bench.network.handover(request_id).is_granted

    def _give_up_one(self) -> None:
        """As in prefill/role.py."""
        waiting = [
            request_id
            for request_id, entry in self._entries.items()
            if entry.sequence.phase in (Phase.HANDING_OVER, Phase.RECEIVING) and not self._is_granted(request_id)
        ]
        if waiting:
            decode = self._entries[waiting[-1]].decode
            self._end(waiting[-1])
            self._bench.tell(decode, KVAbort(waiting[-1], "its blocks were needed on the prefill worker"))

    def _acquire(self, entry: _Entry) -> bool:
        sequence, blocks, share = entry.sequence, self._bench.blocks, self._bench.share
        if share.has_both_roles:
            num_held = sum(e.num_own_blocks for e in self._entries.values())
            if not share.may_hold(num_held, blocks.num_uncached_blocks(sequence)):
                return False
        if not blocks.acquire(sequence, sequence.num_tokens, BlockState.RESERVED):
            return False
        entry.num_own_blocks = len(sequence.block_table) - sequence.num_computed_tokens // self._bench.info.block_size
        return True

    def _receive_prefix(self, entry: _Entry) -> None:
        handover = self._bench.network.handover(prefix_return_id(entry.sequence.request_id))
        handover.open_receiver(
            entry.sequence.num_computed_tokens,
            lambda: self._bench.put(lambda: self._prefix_returned(entry, entry.num_returned_tokens)),
        )

    def _compute(self, entry: _Entry, num_present_tokens: int) -> None:
        sequence = entry.sequence
        self._bench.blocks.settle(sequence)
        sequence.num_computed_tokens = entry.num_cached_tokens = num_present_tokens
        self._pacing.saw(entry.arrived_at, sequence.num_uncomputed_tokens, num_present_tokens)
        self.scheduler.resume(sequence.request_id, sequence.num_uncomputed_tokens)
        handover = self._bench.network.handover(sequence.request_id)
        handover.num_cached_tokens = num_present_tokens
        handover.computed(num_present_tokens, self._bench.clock.now)

    # ---- messages and hand-overs ---------------------------------------------------------------------------------

    def handle(self, sender: NodeRef, message: Message) -> None:
        """Take a message; one that is another role's is ignored."""
        match message:
            case PrefillRequest() as request:
                self._accept(request)
            case AbortRequest(request_id=request_id):
                self._end(request_id)
            case KVAbort(request_id=return_id):
                self._return_failed(request_id_of(return_id))

    def _accept(self, request: PrefillRequest) -> None:
        if self.scheduler.is_full:
            self._bench.tell(request.decode, KVAbort(request.request_id, "this worker's queue is full"))
            return
        sequence = Sequence(request.request_id, request.namespace, request.token_ids, len(request.token_ids))
        num_returned = min(request.num_returned_tokens, sequence.num_tokens - 1)
        self._entries[request.request_id] = _Entry(sequence, request.decode, num_returned, self._bench.clock.now)
        num_uncached = self._bench.blocks.num_uncached_tokens(sequence)
        now = self._bench.clock.now
        self.scheduler.add(Waiting.of(request.request_id, request.urgency, now, num_uncached))
        handover = self._bench.network.handover(request.request_id)
        handover.open_sender(
            self._bench.network.wire(self._bench.ref),
            sequence.num_tokens,
            lambda: self._bench.put(lambda: self._end(request.request_id)),
            self._granted,
        )

    def _granted(self) -> None:
        """Who waits for blocks may have to wait for this hand-over's: to be looked at."""
        if self.scheduler.num_waiting:
            self._bench.wake()

    def _prefix_returned(self, entry: _Entry, num_present_tokens: int) -> None:
        if self._entries.get(entry.sequence.request_id) is entry:
            entry.sequence.on(Event.PREFIX_RETURNED)
            self._compute(entry, num_present_tokens)

    def _return_failed(self, request_id: str | None) -> None:
        """Decode has the prefix no longer: all of it is computed here."""
        entry = self._entries.get(request_id or "")
        if entry is None:
            return
        entry.num_returned_tokens = 0
        if entry.sequence.phase is Phase.RECEIVING:
            self._prefix_returned(entry, entry.sequence.num_computed_tokens)

    def _end(self, request_id: str) -> None:
        """The prompt is handed over, or not wanted any more."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self.scheduler.remove(request_id)
        self._bench.network.drop_handover(request_id)
        self._bench.network.drop_handover(prefix_return_id(request_id))
        self._bench.blocks.release(entry.sequence)
        entry.sequence.on(Event.ENDED)
