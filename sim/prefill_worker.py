"""PrefillWorker: drives the production PrefillScheduler, SequenceBlocks and RadixCache against a device cost model.

The order of things is that of prefill/role.py: admit, plan, launch (one step runs, the next one is in the device's
queue), collect, publish, hand on. Here a step is an event at its end, and KV is a number of bytes.
"""

from collections import deque
from dataclasses import dataclass

from ..core.lifecycle import Event, Phase
from ..core.messages import AbortRequest, KVAbort, Message, NodeRef, PrefillRequest
from ..core.sequence import Sequence
from ..core.step_cost import StepShape, chunk_products
from ..prefill.pacing import PrefillPacing
from ..prefill.scheduler import PlannedChunk, PrefillScheduler
from ..radix_cache.block_pool import BlockState
from ..worker.prefix_return import prefix_return_id, request_id_of
from .worker_base import SimWorker, WorkerParts


@dataclass
class _Entry:
    sequence: Sequence
    decode: NodeRef
    num_returned_tokens: int
    arrived_at: float
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class _Step:
    chunks: list[tuple[_Entry, PlannedChunk]]
    number: int  # SequenceBlocks.step_launched
    began: float
    ends: float


class PrefillWorker(SimWorker):
    def __init__(self, parts: WorkerParts):
        super().__init__(parts)
        self.scheduler = PrefillScheduler(parts.config)
        self._pacing = PrefillPacing(parts.config, self.scheduler, overlaps=parts.overlaps)
        self._entries: dict[str, _Entry] = {}
        self._in_flight: deque[_Step] = deque()
        self._max_in_flight = 2 if parts.overlaps else 1

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        now = self.clock.now
        while self._in_flight and self._in_flight[0].ends <= now:
            self._collect(self._in_flight.popleft())
        while True:
            self._admit()
            self.tune(self._pacing.update)
            plan = self.scheduler.plan() if len(self._in_flight) < self._max_in_flight else []
            if not plan:
                break
            self._launch(plan)
        self.report()

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
        began, ends = self.occupy_device(shape, len(plan))
        self._in_flight.append(_Step(chunks, self.step_launched(shape), began, ends))
        self.clock.at(ends, self.turn)

    def _collect(self, step: _Step) -> None:
        self.step_collected(step.number)
        for entry, planned in step.chunks:
            sequence = entry.sequence
            sequence.collected(planned.num_tokens)
            if self._entries.get(sequence.request_id) is not entry:
                continue
            if planned.is_last:
                sequence.on(Event.PROMPT_HANDED_ON)
            self.blocks.publish(sequence)
            self.network.handover(sequence.request_id).computed(sequence.num_computed_tokens, step.began)

    def _admit(self) -> None:
        while (request_id := self.scheduler.next_waiting()) is not None:
            entry = self._entries[request_id]
            sequence = entry.sequence
            if self.blocks.is_being_computed(sequence, (e.sequence for e in self._entries.values())):
                return
            if not self.blocks.acquire(sequence, sequence.num_tokens, BlockState.RESERVED):
                return
            self.scheduler.admit(request_id, 0)
            if entry.num_returned_tokens > sequence.num_computed_tokens:
                sequence.on(Event.GRANTED)
                self._receive_prefix(entry)
            else:
                sequence.on(Event.ADMITTED)
                self._compute(entry, sequence.num_computed_tokens)

    def _receive_prefix(self, entry: _Entry) -> None:
        def returned() -> None:
            self._prefix_returned(entry, entry.num_returned_tokens)

        handover = self.network.handover(prefix_return_id(entry.sequence.request_id))
        handover.open_receiver(entry.sequence.num_computed_tokens, returned)

    def _compute(self, entry: _Entry, num_present_tokens: int) -> None:
        sequence = entry.sequence
        self.blocks.settle(sequence)
        sequence.num_computed_tokens = entry.num_cached_tokens = num_present_tokens
        self._pacing.saw(entry.arrived_at, sequence.num_uncomputed_tokens, num_present_tokens)
        self.scheduler.resume(sequence.request_id, sequence.num_uncomputed_tokens)
        handover = self.network.handover(sequence.request_id)
        handover.num_cached_tokens = num_present_tokens
        handover.computed(num_present_tokens, self.clock.now)

    # ---- messages and hand-overs ---------------------------------------------------------------------------------

    def handle(self, sender: NodeRef, message: Message) -> None:
        match message:
            case PrefillRequest() as request:
                self._accept(request)
            case AbortRequest(request_id=request_id):
                self._end(request_id)
            case KVAbort(request_id=return_id):
                self._return_failed(request_id_of(return_id))
        self.wake()

    def _accept(self, request: PrefillRequest) -> None:
        if self.scheduler.is_full:
            self.network.send(self.ref, request.decode, KVAbort(request.request_id, "this worker's queue is full"))
            return
        sequence = Sequence(request.request_id, request.namespace, request.token_ids, len(request.token_ids))
        num_returned = min(request.num_returned_tokens, sequence.num_tokens - 1)
        self._entries[request.request_id] = _Entry(sequence, request.decode, num_returned, self.clock.now)
        self.scheduler.add(request.request_id, sequence.num_tokens)
        handover = self.network.handover(request.request_id)
        handover.open_sender(self.network.wire(self.ref), sequence.num_tokens, lambda: self._end(request.request_id))

    def _prefix_returned(self, entry: _Entry, num_present_tokens: int) -> None:
        entry.sequence.on(Event.PREFIX_RETURNED)
        self._compute(entry, num_present_tokens)
        self.wake()

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
        self.network.drop_handover(request_id)
        self.network.drop_handover(prefix_return_id(request_id))
        self.blocks.release(entry.sequence)
        entry.sequence.on(Event.ENDED)
        self.wake()
