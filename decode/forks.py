"""Forks: several choices of one prompt, whose KV is computed, or handed over, once.

    choice 0 (the lead)                      the others
    WAITING, RECEIVING, COMPUTING            WAITING, not in the scheduler's queue: they ride along
      | the prompt's KV is complete,         |
      v its last hidden state is kept        v
    RUNNING                                  WAITING at the head of the queue
                                             | a place in the batch; blocks shared with one that has the prompt
                                             v
                                             RUNNING: the first token is sampled from the hidden state

A fork locks the full blocks of the prompt, like everybody who shares a prefix, and gets a copy of the last one, which
is partial: the first token of each choice is written there. Every block behind it is its own.

While forks wait, the hidden state is kept, and so are the prompt's blocks of the last sibling that ends; those only
until somebody needs blocks. A fork that then finds no sibling with the prompt's KV is like any other sequence that
waits: it computes what the cache does not have of it.

Until the prompt is complete choices differ in nothing but their number; so when the lead's is not wanted any more, it
takes that of another.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from ..core.lifecycle import Event
from ..core.messages import GenerateRequest, NodeRef
from ..core.queueing import Waiting
from ..core.sequence import Sequence
from ..core.timeline import Station, Timeline
from ..worker.workbench import Workbench
from .entry import DecodeEntry


@dataclass
class _Group:
    """One request."""

    lead: DecodeEntry
    place: Waiting  # of the request in the queue
    members: list[DecodeEntry]  # that have not ended
    pending: list[DecodeEntry]  # of those: without blocks or a first token so far; they ride along, then wait
    hidden: Tensor | None = None  # `[hidden_size]` float32 on the host, from the prompt's end until none is pending
    kept: Sequence | None = None  # of one that has ended: the prompt's blocks, for those that are pending

    @property
    def are_riding(self) -> bool:
        return self.hidden is None and bool(self.pending)


@dataclass
class Forks:
    """All requests of the decode role, those of one choice too. Entries of a request are told apart by their choice."""

    bench: Workbench
    _groups: dict[str, _Group] = field(default_factory=dict)
    _first_tokens: list[tuple[DecodeEntry, Tensor]] = field(default_factory=list)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    @property
    def num_riding(self) -> int:
        return sum(len(group.pending) for group in self._groups.values() if group.are_riding)

    def entries(self, request_id: str) -> list[DecodeEntry]:
        """That have not ended; none of an unknown request."""
        group = self._groups.get(request_id)
        return [] if group is None else list(group.members)

    def entry(self, request_id: str, choice: int) -> DecodeEntry | None:
        return next((entry for entry in self.entries(request_id) if entry.choice == choice), None)

    def gateway(self, request_id: str) -> NodeRef:
        """Raises KeyError for an unknown request."""
        return self._groups[request_id].lead.gateway

    def requests_of(self, gateway: NodeRef) -> list[str]:
        return [request_id for request_id, group in self._groups.items() if group.lead.gateway == gateway]

    # ---- the life of a request -----------------------------------------------------------------------------------

    def add(self, lead: DecodeEntry, riders: list[DecodeEntry], place: Waiting) -> None:
        """A new request, and its place in the queue."""
        self._groups[lead.request.request_id] = _Group(lead, place, [lead, *riders], riders)

    def end(self, entry: DecodeEntry) -> None:
        """It ends: its blocks are given back, all or those that are not kept."""
        group, sequence = self._groups[entry.request.request_id], entry.sequence
        group.members.remove(entry)
        self._settle(group, entry)
        if group.hidden is not None and _has_prompt(entry) and self._source(group) is None:
            self.bench.blocks.keep_only(sequence, entry.request.num_prompt_tokens)
            group.kept = sequence
        else:
            self.bench.blocks.release(sequence)
        if not group.members:
            del self._groups[entry.request.request_id]

    def give_up(self) -> bool:
        """Somebody needs blocks: give back some of those that are kept. False: none are."""
        group = next((group for group in self._groups.values() if group.kept is not None), None)
        if group is None:
            return False
        self._release_kept(group)
        return True

    def needs_hidden(self, entry: DecodeEntry) -> bool:
        """Do others wait for the prompt that this one computes?"""
        group = self._groups.get(entry.request.request_id)
        return group is not None and group.lead is entry and group.are_riding

    def who_goes_for(self, entry: DecodeEntry) -> DecodeEntry:
        """The entry to end when the choice of this one is not wanted any more: while others ride, not the lead."""
        if not self.needs_hidden(entry):
            return entry
        rider = self._groups[entry.request.request_id].pending[0]
        entry.choice, rider.choice = rider.choice, entry.choice
        return rider

    def prompt_done(self, entry: DecodeEntry, hidden: Tensor) -> list[tuple[DecodeEntry, Waiting]]:
        """The KV of the lead's prompt is complete and published. Who rode along waits from now on, at these places.

        `hidden`: `[hidden_size]` float32, of the last prompt token.
        """
        if not self.needs_hidden(entry):
            return []
        group = self._groups[entry.request.request_id]
        group.hidden = hidden
        for rider in group.pending:
            rider.timeline, rider.num_cached_tokens = entry.timeline, entry.num_cached_tokens
        return [(rider, _place(group.place, rider)) for rider in group.pending]

    # ---- forking -------------------------------------------------------------------------------------------------

    def source(self, entry: DecodeEntry) -> Sequence | None:
        """A sibling's, whose blocks hold the whole prompt, for a fork that waits; None: it computes what is missing."""
        group = self._groups[entry.request.request_id]
        return self._source(group) if group.hidden is not None and entry in group.pending else None

    def _source(self, group: _Group) -> Sequence | None:
        with_prompt = (member.sequence for member in group.members if _has_prompt(member))
        return next(with_prompt, group.kept)

    def fork(self, source: Sequence, entry: DecodeEntry, headroom: int) -> bool:
        """Blocks for the prompt and one more token, with the prompt's KV; False when they are not there."""
        sequence = entry.sequence
        if not self.bench.blocks.fork(source, sequence, sequence.num_tokens + 1, headroom):
            return False
        index, num_partial = divmod(sequence.num_tokens, self.bench.info.block_size)
        if num_partial:
            self.bench.engine.pool.copy_block(source.block_table[index], sequence.block_table[index])
        group = self._groups[entry.request.request_id]
        assert group.hidden is not None
        sequence.on(Event.FORKED)
        self.first_token(entry, group.hidden)
        self._settle(group, entry)
        return True

    def computes_itself(self, entry: DecodeEntry) -> None:
        """It has joined without a source, or was no fork at all."""
        self._settle(self._groups[entry.request.request_id], entry)

    def _settle(self, group: _Group, entry: DecodeEntry) -> None:
        if entry in group.pending:
            group.pending.remove(entry)
            if not group.pending:
                group.hidden = None
                self._release_kept(group)

    def _release_kept(self, group: _Group) -> None:
        if group.kept is not None:
            self.bench.blocks.release(group.kept)
            group.kept = None

    # ---- first tokens --------------------------------------------------------------------------------------------

    def first_token(self, entry: DecodeEntry, hidden: Tensor) -> None:
        """The prompt's KV is in its blocks: the first token can be sampled from this."""
        self._first_tokens.append((entry, hidden))

    def take_first_tokens(self) -> Iterable[tuple[DecodeEntry, Tensor]]:
        """Those since the last call. Some may have ended since."""
        taken, self._first_tokens = self._first_tokens, []
        return taken


def entries_of(message: GenerateRequest, gateway: NodeRef) -> list[DecodeEntry]:
    """One for each choice. The first leads: its sequence has the request's id, under which its KV is handed over.

    Ids of requests are minted by gateways and have no "/".
    """
    request = message.request
    token_ids = request.prompt_token_ids + request.output_token_ids
    timeline = Timeline() if message.prefill else Timeline().stamped(Station.PREFILL_ARRIVED)
    lead, *others = request.choices

    def sequence(key: str) -> Sequence:
        return Sequence(key, request.namespace, token_ids, request.num_prompt_tokens)

    num_returned_tokens = min(message.num_returned_tokens, len(token_ids) - 1)
    entries = [
        DecodeEntry(
            request, lead, sequence(request.request_id), gateway, message.prefill, timeline, num_returned_tokens
        )
    ]
    plain = msgspec.structs.replace(request, num_prompt_logprobs=None)  # the lead's first chunk has those
    for choice in others:
        own = sequence(f"{request.request_id}/{choice}")
        entries.append(DecodeEntry(plain, choice, own, gateway, None, timeline, 0, is_lead=False))
    return entries


def _has_prompt(entry: DecodeEntry) -> bool:
    return entry.sequence.num_computed_tokens >= entry.request.num_prompt_tokens


def _place(place: Waiting, entry: DecodeEntry) -> Waiting:
    """In the queue, of one whose prompt is computed."""
    return Waiting(entry.sequence.request_id, place.arrived_at, 0, place.key, place.priority, place.is_batch)
