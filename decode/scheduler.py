"""DecodeScheduler: continuous batching. Who joins, who advances by how many tokens, who makes room. Lengths only."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..core.config import SchedulerConfig
from ..core.lifecycle import Phase
from ..core.sequence import Sequence
from ..engine.chunk_planning import plan_chunks

MIN_PROMPT_SHARE = 4  # prompts get at least 1/4 of the token budget


@dataclass(frozen=True)
class DecodePlan:
    """One forward pass: each sequence with the number of tokens it computes. Decodes, of one token each, come first."""

    chunks: list[tuple[Sequence, int]]
    num_decodes: int


class DecodeScheduler:
    """Requests wait in order of arrival, join the batch when their blocks are there, and leave when they end.

    The batch mixes one-token decodes with chunks of prompts that are computed here, under one token budget; decodes
    come first, so a long prompt lengthens a step by at most the budget; prompts never get less than a share of it.
    When the pool is used up, the sequence that joined last goes back to the head of the queue: the oldest always
    moves, so the batch cannot stand still.
    """

    def __init__(self, config: SchedulerConfig):
        self._config = config
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}  # in order of joining; RECEIVING, COMPUTING and RUNNING ones
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed here (those being handed over are another worker's work)."""
        computing = (s.num_uncomputed_tokens for s in self._running.values() if s.phase is Phase.COMPUTING)
        return sum(s.num_tokens for s in self._waiting) + sum(computing)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._config.max_waiting

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def next_waiting(self) -> Sequence | None:
        """The request whose blocks should be found next, if another one may join."""
        if not self._waiting or len(self._running) >= self._config.max_running:
            return None
        return self._waiting[0]

    def admit(self, sequence: Sequence) -> None:
        assert self._waiting[0] is sequence
        self._waiting.popleft()
        self._running[sequence.request_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a request in any phase."""
        if self._running.pop(sequence.request_id, None) is None and sequence in self._waiting:
            self._waiting.remove(sequence)

    def num_missing_blocks(self, missing_blocks: Callable[[Sequence], int]) -> int:
        """How many blocks the decodes of the next step need that they do not have."""
        return sum(missing_blocks(s) for s in self._decoding())

    def make_room(
        self,
        missing_blocks: Callable[[Sequence], int],
        num_available_blocks: Callable[[], int],
        preempt: Callable[[Sequence], None],
    ) -> None:
        """Preempt the sequences that joined last until all decodes of the next step have a block to write to.

        A hand-over in progress cannot be preempted; it ends by itself (commit, abort or lease). Nothing may be in
        flight: the blocks are free at once.
        """
        while self.num_missing_blocks(missing_blocks) > num_available_blocks():
            victims = [s for s in self._running.values() if s.phase in (Phase.RUNNING, Phase.COMPUTING)]
            if len(victims) < 2:
                return
            victim = victims[-1]
            del self._running[victim.request_id]
            preempt(victim)
            self._waiting.appendleft(victim)
            self.num_preemptions += 1

    def plan(self, can_grow: Callable[[Sequence], bool]) -> DecodePlan:
        """The next forward pass. `can_grow` gives a sequence room for its next token, or says that there is none."""
        decodes = [(s, 1) for s in self._decoding() if can_grow(s)]
        computing = [s for s in self._running.values() if s.phase is Phase.COMPUTING and not s.num_pending_tokens]
        # However many decode, prompts get a share: a steady batch must not starve those who wait to join it.
        budget = max(self._config.token_budget - len(decodes), self._config.token_budget // MIN_PROMPT_SHARE, 1)
        counts = plan_chunks([s.num_uncomputed_tokens for s in computing], budget, self._config.chunk_size)
        chunks = [(s, n) for s, n in zip(computing, counts, strict=True) if n]
        return DecodePlan(decodes + chunks, len(decodes))

    def _decoding(self) -> list[Sequence]:
        """Those whose prompt is computed, or being computed up to its end: then the first token is pending."""
        return [s for s in self._running.values() if s.phase is Phase.RUNNING or s.num_pending_tokens]
