"""DecodeBatch: which sequences decode, and how many tokens each has, without touching each of them at each step.

A decode step gives every member one token, so the state of a member is the step it joined with and how many tokens it
had then. Its sequence is written when it leaves, or when its owner asks (`num_tokens`). Steps are numbered as launched
and collected in that order.
"""

from collections import deque
from dataclasses import dataclass, field

from ..core.messages import NodeRef
from ..core.request import Request
from ..core.sequence import Sequence
from .answers import Answers


@dataclass(eq=False)
class BatchEntry:
    """What a decode worker remembers of one request. `joined_step` None: its sequence is up to date."""

    request: Request
    sequence: Sequence
    prefill: NodeRef | None
    num_returned_tokens: int
    num_outputs: int  # tokens of the whole answer
    num_reported: int  # of them, to the gateway
    reported_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_cached_tokens: int | None = None
    expected_output: int = -1  # index of the output token that was sampled last outside of a decode step
    joined_step: int | None = None
    tokens_at_join: int = 0
    ends_with: int | None = None  # the step that brings its last token

    def expect(self) -> None:
        """The token after its prompt is being sampled."""
        self.expected_output = self.sequence.num_output_tokens
        self.sequence.expect()

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequence.num_prompt_tokens


class Gaps:
    """Inter-token latencies: (seconds, how many times)."""

    def __init__(self) -> None:
        self.counted: list[tuple[float, int]] = []

    def add(self, seconds: float, count: int) -> None:
        if count:
            self.counted.append((seconds, count))


@dataclass
class _Launched:
    """A step in flight. Who ends before it is collected is taken out."""

    size: int
    joiners: list[BatchEntry]
    sits_out_next: list[BatchEntry] = field(default_factory=list)


class DecodeBatch:
    def __init__(self, gaps: Gaps, answers: Answers):
        self._gaps = gaps
        self._answers = answers
        self._members: dict[str, BatchEntry] = {}
        self._decodes: list[tuple[Sequence, int]] = []  # of the plan they came with
        self._context_offset = 0  # sum of tokens_at_join - joined_step
        self._num_launched = 0
        self._in_flight: deque[_Launched] = deque()
        self._ends: dict[int, list[BatchEntry]] = {}
        self._collected_at = 0.0

    def num_tokens(self, entry: BatchEntry) -> int:
        """Known and pending tokens of a sequence, in the batch or not."""
        if entry.joined_step is None:
            return entry.sequence.num_tokens
        return entry.tokens_at_join + self._num_launched - entry.joined_step

    def launch(self, decodes: list[tuple[Sequence, int]], entries: dict[str, BatchEntry]) -> int:
        """The next step, of a plan's decodes. Returns the tokens they attend to, over all of them."""
        joiners: list[BatchEntry] = []
        if decodes is not self._decodes:
            joiners = self._change(decodes, entries)
            self._decodes = decodes
        size = len(self._members)
        context = self._context_offset + size * self._num_launched
        self._in_flight.append(_Launched(size, joiners))
        self._num_launched += 1
        return context

    def collect(self, now: float) -> tuple[int, list[BatchEntry]]:
        """The oldest step in flight is over: how many tokens it brought, and whose answers are complete with it."""
        step = self._num_launched - len(self._in_flight)
        launched = self._in_flight.popleft()
        self._gaps.add(now - self._collected_at, launched.size - len(launched.joiners))
        for entry in launched.joiners:
            assert entry.last_token_at is not None
            self._gaps.add(now - entry.last_token_at, 1)
        for entry in launched.sits_out_next:
            entry.last_token_at = now
        self._collected_at = now
        ended = [entry for entry in self._ends.pop(step, ()) if entry.ends_with == step]
        return launched.size, ended

    def remove(self, entry: BatchEntry, num_known: int) -> None:
        """It has ended or is preempted, with so many known tokens; its sequence is up to date then."""
        if entry.joined_step is not None:
            oldest = self._num_launched - len(self._in_flight)
            for step, launched in enumerate(self._in_flight, oldest):
                launched.size -= step >= entry.joined_step
                if step == entry.joined_step:
                    launched.joiners.remove(entry)
            self._forget(entry)
            entry.last_token_at = self._collected_at
        entry.ends_with = None
        self._write(entry, num_known)

    def _change(self, decodes: list[tuple[Sequence, int]], entries: dict[str, BatchEntry]) -> list[BatchEntry]:
        """Others decode from now on. Returns who is new."""
        request_ids = {sequence.request_id for sequence, _ in decodes}
        for entry in [e for request_id, e in self._members.items() if request_id not in request_ids]:
            num_tokens = self.num_tokens(entry)
            self._forget(entry)
            self._write(entry, num_tokens)
            if entry.ends_with is not None and entry.ends_with >= self._num_launched:
                self._sit_out(entry)
        joiners = [entries[s.request_id] for s, _ in decodes if s.request_id not in self._members]
        for entry in joiners:
            self._join(entry)
        return joiners

    def _sit_out(self, entry: BatchEntry) -> None:
        """It has left for want of a block, and will join again."""
        entry.ends_with = None
        if self._in_flight:
            self._in_flight[-1].sits_out_next.append(entry)
        else:
            entry.last_token_at = self._collected_at

    def _join(self, entry: BatchEntry) -> None:
        step, num_tokens = self._num_launched, entry.sequence.num_tokens
        entry.joined_step, entry.tokens_at_join = step, num_tokens
        self._members[entry.sequence.request_id] = entry
        self._context_offset += num_tokens - step
        num_left = entry.num_outputs - entry.sequence.num_output_tokens
        entry.ends_with = step + num_left - 1
        if num_left > 0:
            self._ends.setdefault(entry.ends_with, []).append(entry)

    def _forget(self, entry: BatchEntry) -> None:
        assert entry.joined_step is not None
        del self._members[entry.sequence.request_id]
        self._context_offset -= entry.tokens_at_join - entry.joined_step
        entry.joined_step = None

    def _write(self, entry: BatchEntry, num_known: int) -> None:
        """The newest token's KV is what the next step would compute."""
        sequence = entry.sequence
        start, stop = sequence.num_known_output_tokens, num_known - sequence.num_prompt_tokens
        sequence.token_ids += self._answers.token_ids(entry.request.sampling.seed, start, stop)
        sequence.num_computed_tokens = num_known - 1
        sequence.num_in_flight_tokens = sequence.num_pending_tokens = 0
