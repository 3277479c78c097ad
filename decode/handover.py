"""Handovers: prompts that another worker computes, from the grant to the commit or the failure.

    decode                                     prefill
      | open: reserved blocks, KVGrant  ------>  |
      | the KV of a cached prefix that was       |
      | promised, if it is still here   ------>  |   (only where decode knows more of the prompt than prefill)
      |  <------  pieces of what decode lacks    |
      |  <------  commit: the last hidden state  |
    the first token can be sampled

Whatever goes wrong, the request is left with what has arrived, and the rest of it is computed here.
"""

import logging

import torch
from torch import Tensor

from ..core.lifecycle import Event, Phase
from ..core.messages import KVAbort, KVCommit, NodeRef
from ..core.timeline import Station, Timeline
from ..worker.prefix_return import prefix_return_id
from ..worker.workbench import Workbench
from .entry import DecodeEntry

logger = logging.getLogger(__name__)


class Handovers:
    def __init__(self, bench: Workbench):
        self._bench = bench

    def open(self, entry: DecodeEntry, now: float) -> None:
        """The request has its blocks: let the prefill worker send what is missing in them."""
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

    def commit(self, entry: DecodeEntry, commit: KVCommit, timeline: Timeline) -> Tensor | None:
        """All KV is in. Returns the last hidden state, `[hidden_size]` float32, or None when it is not one."""
        sequence = entry.sequence
        if len(commit.hidden) != 4 * self._bench.engine.model_config.hidden_size:
            self.fail(entry, f"a hidden state of {len(commit.hidden)} bytes", sequence.num_tokens)
            return None
        sequence.on(Event.KV_COMMITTED)
        self._stop_returning(entry, "the hand-over is complete")
        self._bench.blocks.settle(sequence)
        sequence.num_computed_tokens = sequence.num_tokens
        self._bench.blocks.publish(sequence)
        entry.count_cached(commit.num_cached_tokens)
        entry.timeline = entry.timeline.merged(timeline)
        entry.stamp_once(Station.HANDED_OVER)
        return torch.frombuffer(bytearray(commit.hidden), dtype=torch.float32)

    def fail(self, entry: DecodeEntry, reason: str, contiguous_tokens: int) -> None:
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

    def abort(self, entry: DecodeEntry, reason: str) -> None:
        """The request is not wanted any more. Nothing happens when it is not being handed over."""
        if entry.sequence.phase is Phase.RECEIVING:
            self._bench.link.abort(entry.request.request_id, reason)

    def close(self, entry: DecodeEntry) -> None:
        """The request ends."""
        self._stop_returning(entry, "the request has ended")

    def _stop_returning(self, entry: DecodeEntry, reason: str) -> None:
        """Prefill may never have wanted the prefix: it may have cached it meanwhile. Nothing reads the blocks now."""
        if entry.num_returned_tokens:
            self._bench.link.abort(prefix_return_id(entry.request.request_id), reason)
