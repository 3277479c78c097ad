"""DecodeRole: the life of a request on the worker that generates its tokens.

    WAITING     GenerateRequest arrived; it owns nothing
      | a place in the batch, a lock on the matched prefix, blocks for the rest of the prompt
      |
      |-- prefill worker named --> RECEIVING   blocks reserved, KVGrant sent; pieces are placed as they come
      |                              | commit: KV and the last hidden state are in; the first token is sampled at once
      |                              | failure (peer died, lease, abort, checksum): what is missing is computed here
      |-- none named ------------> COMPUTING   prompt chunks share the forward passes with everybody's decodes
      v
    RUNNING     one token a step; the pool used up: the last one in goes back to WAITING, its KV stays as cache
      | stop token, max_tokens, abort
    FINISHED    prompt and output stay behind in the radix tree; everything else is given back

A sequence that comes back from preemption, or from another worker that died, is nothing special: its uncomputed tokens
are computed, and counted randomness goes on at the same position.
"""

import logging

import torch

from ..core.lifecycle import Event, Phase
from ..core.messages import AbortRequest, GenerateRequest, KVAbort, KVCommit, NodeRef, RequestFailed
from ..core.request import Request
from ..core.sequence import Sequence
from ..core.timeline import Station, Timeline
from ..engine.forward_batch import Chunk, build_forward_batch
from ..radix_cache.block_pool import BlockState
from ..transfer.channels import Incoming
from ..transfer.link import HandedOver, LinkEvent, ReceiveFailed
from ..worker.membership import Membership
from ..worker.prefix_return import prefix_return_id
from ..worker.workbench import Workbench
from .entry import DecodeEntry
from .scheduler import DecodePlan, DecodeScheduler

logger = logging.getLogger(__name__)


class DecodeRole:
    def __init__(self, bench: Workbench, membership: Membership):
        self._bench = bench
        self._membership = membership
        self._scheduler = DecodeScheduler(bench.config.scheduler)
        self._entries: dict[str, DecodeEntry] = {}
        self._arrived: list[tuple[DecodeEntry, KVCommit]] = []  # handed over, first token not yet sampled
        self._draining = False

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting_tokens(self) -> int:
        return self._scheduler.num_waiting_tokens

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    # ---- the loop --------------------------------------------------------------------------------------------

    def step(self, now: float) -> bool:
        self._sample_arrived()
        self._admit(now)
        self._scheduler.make_room(self._missing_blocks, self._num_available_blocks, self._preempt)
        plan = self._scheduler.plan(self._grow)
        if not plan.chunks:
            return False
        self._collect(*self._launch(plan))
        return True

    def _launch(self, plan: DecodePlan) -> tuple[DecodePlan, torch.Tensor]:
        """One forward pass over decodes and prompt chunks: hidden states of the sequences it brings up to date."""
        chunks = []
        for sequence, num_tokens in plan.chunks:
            start, stop = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
            is_last = stop == sequence.num_tokens
            chunks.append(Chunk(sequence.token_ids[start:stop], start, sequence.block_table, is_last))
            if sequence.phase is Phase.COMPUTING:
                self._entries[sequence.request_id].stamp_once(Station.PREFILL_STARTED)
        return plan, self._bench.engine.runner.forward(build_forward_batch(chunks, self._bench.info.block_size))

    def _collect(self, plan: DecodePlan, hidden: torch.Tensor) -> None:
        ready = []
        for sequence, num_tokens in plan.chunks:
            sequence.advance_computed(num_tokens)
            if sequence.num_uncomputed_tokens:
                self._bench.blocks.publish(sequence)
                continue
            entry = self._entries[sequence.request_id]
            if sequence.phase is Phase.COMPUTING:
                sequence.on(Event.PROMPT_COMPUTED)
                entry.stamp_once(Station.PREFILL_COMPUTED, Station.HANDED_OVER)
                self._bench.blocks.publish(sequence)
            ready.append(entry)
        if ready:
            self._sample(ready, hidden)

    def _sample_arrived(self) -> None:
        """The first token of every request whose hand-over is complete: no forward pass, only lm_head and sampling."""
        arrived, self._arrived = self._arrived, []
        arrived = [(entry, commit) for entry, commit in arrived if self._is_live(entry)]
        if arrived:
            hidden = [torch.frombuffer(bytearray(commit.hidden), dtype=torch.float32) for _, commit in arrived]
            self._sample([entry for entry, _ in arrived], torch.stack(hidden))

    def _sample(self, entries: list[DecodeEntry], hidden: torch.Tensor) -> None:
        """Sample one token for each entry from `hidden` ([num_entries, hidden_size]), send it, end what is done."""
        rows = [entry.sampling_row() for entry in entries]
        engine = self._bench.engine
        token_ids = engine.sampler.sample(engine.runner.logits(hidden), rows)
        for entry, token_id in zip(entries, token_ids, strict=True):
            if token_id is not None:
                self._emit(entry, token_id)
            else:
                request_id = entry.request.request_id
                self._bench.tell(entry.gateway, RequestFailed(request_id, "the model's logits are not finite", False))
                self._end(request_id)

    def _emit(self, entry: DecodeEntry, token_id: int) -> None:
        chunk = entry.take(token_id)
        self._bench.counters["num_tokens_generated"] += 1
        if chunk.finish_reason is not None:
            self._end(chunk.request_id)
            self._bench.reporter.report()  # before the client can come back with its next turn
        self._bench.tell(entry.gateway, chunk)

    # ---- blocks ------------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Let requests join while there is a place and there are blocks for them."""
        while (sequence := self._scheduler.next_waiting()) is not None:
            entry = self._entries[sequence.request_id]
            is_remote = self._membership.knows(entry.prefill)
            if not is_remote and self._is_being_computed(sequence):
                return
            state = BlockState.RESERVED if is_remote else BlockState.PRIVATE
            headroom = self._scheduler.num_running
            if not self._bench.blocks.acquire(sequence, sequence.num_tokens + 1, state, headroom):
                return
            self._scheduler.admit(sequence)
            if is_remote:
                self._receive(entry, now)
            else:
                sequence.on(Event.ADMITTED)
                entry.count_cached(sequence.num_computed_tokens)

    def _is_being_computed(self, sequence: Sequence) -> bool:
        return self._bench.blocks.is_being_computed(sequence, (e.sequence for e in self._entries.values()))

    def _receive(self, entry: DecodeEntry, now: float) -> None:
        sequence = entry.sequence
        sequence.on(Event.GRANTED)
        assert entry.prefill is not None
        if entry.num_returned_tokens:
            self._return_prefix(entry, entry.prefill, now)
        self._bench.link.open_receiver(
            sequence.request_id,
            entry.prefill,
            sequence.block_table,
            sequence.num_computed_tokens,
            sequence.num_tokens,
            now,
        )

    def _return_prefix(self, entry: DecodeEntry, prefill: NodeRef, now: float) -> None:
        """Hand over what is cached here and was promised; where it is gone by now, prefill computes it after all."""
        sequence, return_id = entry.sequence, prefix_return_id(entry.sequence.request_id)
        num_tokens = entry.num_returned_tokens
        if sequence.num_computed_tokens < num_tokens:
            self._bench.tell(prefill, KVAbort(return_id, "the prefix is no longer cached"))
            return
        self._bench.link.open_sender(return_id, prefill, sequence.block_table, num_tokens, now)
        self._bench.link.computed(return_id, num_tokens, now)
        self._bench.link.finish(return_id, b"", num_tokens, Timeline(), now)

    def _stop_returning(self, entry: DecodeEntry, reason: str) -> None:
        """Prefill may never have wanted the prefix: it may have cached it meanwhile. Nothing reads the blocks now."""
        if entry.num_returned_tokens:
            self._bench.link.abort(prefix_return_id(entry.request.request_id), reason)

    def _missing_blocks(self, sequence: Sequence) -> int:
        return self._bench.blocks.missing_blocks(sequence, sequence.num_tokens)

    def _num_available_blocks(self) -> int:
        return self._bench.cache.num_available

    def _grow(self, sequence: Sequence) -> bool:
        return self._bench.blocks.grow(sequence, sequence.num_tokens)

    def _preempt(self, sequence: Sequence) -> None:
        logger.debug("preempted %s with %d tokens", sequence.request_id, sequence.num_tokens)
        self._bench.blocks.release(sequence)
        sequence.on(Event.PREEMPTED)
        self._entries[sequence.request_id].prefill = None  # what is missing is computed here

    # ---- messages and events -----------------------------------------------------------------------------------

    def handle(self, incoming: Incoming, now: float) -> None:
        match incoming.body:
            case GenerateRequest() as message:
                self._accept(message, incoming.sender)
            case AbortRequest(request_id=request_id, reason=reason) if request_id in self._entries:
                self._abort(request_id, reason)

    def _accept(self, message: GenerateRequest, gateway: NodeRef) -> None:
        request = message.request
        if refusal := self._why_not(request):
            self._bench.tell(gateway, RequestFailed(request.request_id, *refusal))
            return
        token_ids = request.prompt_token_ids + request.output_token_ids
        sequence = Sequence(request.request_id, request.namespace, token_ids, request.num_prompt_tokens)
        timeline = Timeline() if message.prefill else Timeline().stamped(Station.PREFILL_ARRIVED)
        num_returned = min(message.num_returned_tokens, sequence.num_tokens - 1)
        self._entries[request.request_id] = DecodeEntry(
            request, sequence, gateway, message.prefill, timeline, num_returned
        )
        self._scheduler.add(sequence)

    def _why_not(self, request: Request) -> tuple[str, bool] | None:
        """(reason, retryable) when the request cannot be taken."""
        room = request.num_prompt_tokens + request.sampling.max_tokens
        if request.request_id in self._entries:
            return "a request with this id is already here", False
        if room > self._bench.info.context_length:
            return f"{room} tokens are asked for, this worker holds {self._bench.info.context_length}", False
        if self._draining:
            return "this worker is leaving", True
        if self._scheduler.is_full:
            return "this worker's queue is full", True
        return None

    def on_link_event(self, event: LinkEvent, now: float) -> None:
        match event:
            case HandedOver(request_id=request_id, commit=commit, timeline=timeline) if request_id in self._entries:
                self._handed_over(self._entries[request_id], commit, timeline)
            case ReceiveFailed(request_id=r, reason=reason, contiguous_tokens=n) if r in self._entries:
                self._handover_failed(self._entries[r], reason, n)

    def _handed_over(self, entry: DecodeEntry, commit: KVCommit, timeline: Timeline) -> None:
        sequence = entry.sequence
        if len(commit.hidden) != 4 * self._bench.engine.model_config.hidden_size:
            self._handover_failed(entry, f"a hidden state of {len(commit.hidden)} bytes", sequence.num_tokens)
            return
        sequence.on(Event.KV_COMMITTED)
        self._stop_returning(entry, "the hand-over is complete")
        self._bench.blocks.settle(sequence)
        sequence.num_computed_tokens = sequence.num_tokens
        self._bench.blocks.publish(sequence)
        entry.count_cached(commit.num_cached_tokens)
        entry.timeline = entry.timeline.merged(timeline)
        entry.stamp_once(Station.HANDED_OVER)
        self._arrived.append((entry, commit))

    def _handover_failed(self, entry: DecodeEntry, reason: str, contiguous_tokens: int) -> None:
        """Compute here what did not arrive; what did arrive was checked piece by piece and stays."""
        sequence = entry.sequence
        logger.debug("hand-over of %s failed (%s); computing the rest here", sequence.request_id, reason)
        self._bench.counters["num_handover_failures"] += 1
        sequence.on(Event.KV_FAILED)
        self._stop_returning(entry, "the hand-over has failed")
        self._bench.blocks.settle(sequence)
        sequence.num_computed_tokens = min(
            max(sequence.num_computed_tokens, contiguous_tokens), sequence.num_tokens - 1
        )
        entry.count_cached(0)  # the failed worker cannot tell any more what it had
        entry.timeline = entry.timeline.stamped(Station.PREFILL_ARRIVED)

    def gateway_lost(self, gateway: NodeRef) -> None:
        for request_id in [r for r, entry in self._entries.items() if entry.gateway == gateway]:
            # Should it only have been stopped for a while, it must not wait for tokens that will not come.
            self._bench.tell(gateway, RequestFailed(request_id, "the gateway was silent for too long", True))
            self._abort(request_id, "its gateway is gone")

    def drain(self) -> None:
        self._draining = True

    def _abort(self, request_id: str, reason: str) -> None:
        if self._entries[request_id].sequence.phase is Phase.RECEIVING:
            self._bench.link.abort(request_id, reason)
        self._end(request_id)

    def _end(self, request_id: str) -> None:
        """Leave for FINISHED: free what the lifecycle row says this request owns here."""
        entry = self._entries.pop(request_id)
        self._scheduler.remove(entry.sequence)
        self._stop_returning(entry, "the request has ended")
        self._bench.blocks.release(entry.sequence)
        entry.sequence.on(Event.ENDED)

    def _is_live(self, entry: DecodeEntry) -> bool:
        return self._entries.get(entry.request.request_id) is entry
