"""DecodeScheduler: continuous batching. Who joins, who advances by how many tokens, who makes room. Lengths only."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ..core.config import SchedulerConfig
from ..core.lifecycle import Phase
from ..core.queueing import Rank, Waiting, WaitingQueue
from ..core.sequence import Sequence
from ..core.step_cost import StepShape, chunk_products
from ..worker.urgency import share_budget

MIN_PROMPT_SHARE = 4  # prompts get at least 1/4 of the token budget


@dataclass(frozen=True)
class DecodePlan:
    """One forward pass: sequences that decode, one token each, then prompts with the number of tokens they compute.

    `decodes` is the same list as in the plan before when the same sequences decode.
    """

    decodes: list[tuple[Sequence, int]]
    prompts: list[tuple[Sequence, int]]

    @property
    def chunks(self) -> list[tuple[Sequence, int]]:
        return self.decodes + self.prompts

    @property
    def num_decodes(self) -> int:
        return len(self.decodes)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(n for _, n in self.prompts)

    @property
    def shape(self) -> StepShape:
        """What the duration depends on; before the plan is launched, which makes its sequences longer."""
        return StepShape(
            num_prompt_tokens=self.num_prompt_tokens,
            prompt_products=sum(chunk_products(s.num_launched_tokens, n) for s, n in self.prompts),
            num_decodes=len(self.decodes),
            decode_context=sum(s.num_tokens for s, _ in self.decodes),
        )


@dataclass
class _Member:
    """One of the running ones beside its sequence. The numbers are of plans."""

    entry: Waiting
    rank: Rank
    asked_at: int = 0  # when it was last asked for room
    ask_at: int = 0  # before which it is asked next; 0: it has not decoded yet


class DecodeScheduler:
    """Requests wait in the order of the policy, join the batch when their blocks are there, and leave when they end.

    The batch mixes one-token decodes with chunks of prompts that are computed here, under one token budget; decodes
    come first, so a long prompt lengthens a step by at most the budget; prompts never get less than a share of it.
    When the pool is used up, the least urgent, and of those the one that joined last, goes back to the head of its
    queue: the oldest of the most urgent always moves, so the batch cannot stand still. Batch requests make way as
    well when an interactive one finds no place or no blocks; they come back when none waits.

    A step costs the work that changed: a decode is looked at when its room may be used up, not at each step. Every
    plan that has chunks must be launched, which makes each of its decodes one token longer.
    """

    def __init__(self, config: SchedulerConfig):
        self._config = config
        self.max_running = config.max_running  # may be changed between plans, as may the prompt budget
        self.prompt_budget: int | None = None  # prompt tokens of a step; None: what decodes leave of the token budget
        self._queue = WaitingQueue(config.policy)
        self._waiting: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}  # in order of joining; RECEIVING, COMPUTING and RUNNING ones
        self._members: dict[str, _Member] = {}  # of those
        self._num_batch = 0  # of those
        self._joining: dict[str, Sequence] = {}  # those of them that have not decoded yet
        self._num_plans = 0
        self._to_ask: dict[int, list[Sequence]] = {}  # by the plan before which it is asked; who left since is skipped
        self._with_room: set[str] = set()  # requests that decode in the next plan unless something changes
        self._decodes: list[tuple[Sequence, int]] | None = []  # None: to be made anew
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_any_that_advance(self) -> bool:
        """Is there one that will end whatever other workers do? A hand-over in progress needs its prefill worker."""
        return any(s.phase is not Phase.RECEIVING for s in self._running.values())

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed here (those being handed over are another worker's work)."""
        computing = (s.num_uncomputed_tokens for s in self._joining.values() if s.phase is Phase.COMPUTING)
        return sum(s.num_tokens for s in self._waiting.values()) + sum(computing)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._config.max_waiting

    # ---- who joins, who leaves -----------------------------------------------------------------------------------

    def add(self, sequence: Sequence, entry: Waiting, *, returning: bool = False) -> None:
        """`returning`: before all of its class."""
        self._queue.push(entry, returning=returning)
        self._waiting[sequence.request_id] = sequence

    def next_waiting(self, now: float) -> Sequence | None:
        """The request whose blocks should be found next, if another one may join."""
        if len(self._running) >= self.max_running:
            return None
        entry = self._queue.peek(now)
        return None if entry is None else self._waiting[entry.request_id]

    def yields(self, sequence: Sequence, to: Sequence) -> bool:
        """Is it less urgent than `to`, which waits, and so computed after the likes of it? No when it does not run."""
        member = self._members.get(sequence.request_id)
        return member is not None and member.rank > self._queue.rank(to.request_id)

    def admit(self, sequence: Sequence) -> None:
        """It has its blocks. Raises KeyError when it does not wait."""
        request_id = sequence.request_id
        rank, entry = self._queue.rank(request_id), self._queue.remove(request_id)
        assert entry is not None
        del self._waiting[request_id]
        self._running[request_id] = self._joining[request_id] = sequence
        self._members[request_id] = _Member(entry, rank)
        self._num_batch += entry.is_batch
        self._queue.served(entry.key, entry.num_tokens, is_batch=entry.is_batch)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request in any phase."""
        if sequence.request_id in self._running:
            self._leave(sequence)
        elif self._waiting.pop(sequence.request_id, None) is not None:
            self._queue.remove(sequence.request_id)

    def _leave(self, sequence: Sequence) -> _Member:
        request_id = sequence.request_id
        member = self._members.pop(request_id)
        del self._running[request_id]
        self._num_batch -= member.entry.is_batch
        self._joining.pop(request_id, None)
        if request_id in self._with_room:
            self._serve(member, self._num_plans + 1)
            self._with_room.remove(request_id)
            self._decodes = None
        return member

    # ---- who makes room ------------------------------------------------------------------------------------------

    def num_missing_blocks(self, missing_blocks: Callable[[Sequence], int]) -> int:
        """How many blocks the decodes of the next step need that they do not have."""
        return sum(missing_blocks(s) for s in self._due())

    def make_room(
        self,
        missing_blocks: Callable[[Sequence], int],
        num_available_blocks: Callable[[], int],
        preempt: Callable[[Sequence], None],
    ) -> None:
        """Preempt the least urgent until all decodes of the next step have a block to write to.

        A hand-over in progress cannot be preempted; it ends by itself (commit, abort or lease). Nothing may be in
        flight: the blocks are free at once.
        """
        while self.num_missing_blocks(missing_blocks) > num_available_blocks():
            candidates = self._preemptible()
            if len(candidates) < 2:
                return
            candidates.reverse()  # of equals the first is taken: who joined last
            self._preempt(max(candidates, key=lambda s: self._members[s.request_id].rank), preempt)

    def is_behind_batch(self, now: float, lacking_blocks: Callable[[Sequence], int]) -> bool:
        """Does an interactive request wait for a place or for blocks that batch requests would leave to it?

        `lacking_blocks` says how many more must be available for a request to join.
        """
        if self._num_batch == 0 or (entry := self._queue.peek(now, with_batch=False)) is None:
            return False
        batch = self._preemptible_batch()
        if len(self._running) - len(batch) >= self.max_running:
            return False
        num_lacking = lacking_blocks(self._waiting[entry.request_id])
        if num_lacking == 0 and len(self._running) < self.max_running:
            return False
        return num_lacking <= len({block_id for s in batch for block_id in s.block_table})

    def make_way(
        self, now: float, lacking_blocks: Callable[[Sequence], int], preempt: Callable[[Sequence], None]
    ) -> None:
        """Preempt batch requests, the last to join first, until the interactive one can join that is next.

        None of them is preempted in vain time after time: they join again when no interactive request waits. Nothing
        may be in flight.
        """
        while self.is_behind_batch(now, lacking_blocks):
            self._preempt(self._preemptible_batch()[-1], preempt)

    def _preemptible(self) -> list[Sequence]:
        return [s for s in self._running.values() if s.phase in (Phase.RUNNING, Phase.COMPUTING)]

    def _preemptible_batch(self) -> list[Sequence]:
        return [s for s in self._preemptible() if self._members[s.request_id].rank.is_batch]

    def _preempt(self, victim: Sequence, preempt: Callable[[Sequence], None]) -> None:
        """Back to the queue. Its prompt is not served a second time: that it is computed again is not its fault."""
        entry = msgspec.structs.replace(self._leave(victim).entry, num_tokens=0)
        preempt(victim)
        self._queue.push(entry, returning=True)
        self._waiting[victim.request_id] = victim
        self.num_preemptions += 1

    # ---- who advances --------------------------------------------------------------------------------------------

    def plan(self, room: Callable[[Sequence], int]) -> DecodePlan:
        """The next forward pass. `room` finds a sequence room for its next token, and says for how many tokens from
        now on it has some: the sequence is not asked before they are computed. 0: it sits this step out.
        """
        due = self._due()
        self._num_plans += 1
        self._to_ask.pop(self._num_plans, None)
        for sequence in due:
            self._ask(sequence, room)
        if self._decodes is None:
            self._decodes = [(s, 1) for request_id, s in self._running.items() if request_id in self._with_room]
        return DecodePlan(self._decodes, self._prompts(len(self._decodes)))

    def prompt_room(self, num_decodes: int) -> int:
        """Prompt tokens that a step may compute beside so many decodes."""
        if self.prompt_budget is not None:
            return self.prompt_budget
        # However many decode, prompts get a share: a steady batch must not starve those who wait to join it.
        return max(self._config.token_budget - num_decodes, self._config.token_budget // MIN_PROMPT_SHARE, 1)

    def _prompts(self, num_decodes: int) -> list[tuple[Sequence, int]]:
        computing = [s for s in self._joining.values() if s.phase is Phase.COMPUTING]
        if not computing:
            return []
        counts = share_budget(
            [s.num_uncomputed_tokens for s in computing],
            [self._members[s.request_id].rank for s in computing],
            self.prompt_room(num_decodes),
            self._config.chunk_size,
        )
        return [(s, n) for s, n in zip(computing, counts, strict=True) if n]

    def _due(self) -> list[Sequence]:
        """Decodes to be asked for room before the next plan: their room may be used up, or they decode for the first
        time: the prompt is computed, or being computed up to its end (then the first token is pending).
        """
        number = self._num_plans + 1
        due = [
            s
            for s in self._to_ask.get(number, ())
            if self._running.get(s.request_id) is s and self._members[s.request_id].ask_at == number
        ]
        return due + [s for s in self._joining.values() if s.phase is Phase.RUNNING or s.num_pending_tokens]

    def _ask(self, sequence: Sequence, room: Callable[[Sequence], int]) -> None:
        request_id = sequence.request_id
        member = self._members[request_id]
        if request_id in self._with_room:
            self._serve(member, self._num_plans)
        num_tokens = room(sequence)
        member.asked_at, member.ask_at = self._num_plans, self._num_plans + max(num_tokens, 1)
        self._joining.pop(request_id, None)
        self._to_ask.setdefault(member.ask_at, []).append(sequence)
        if (num_tokens > 0) is not (request_id in self._with_room):
            self._with_room ^= {request_id}
            self._decodes = None

    def _serve(self, member: _Member, plan: int) -> None:
        """It has decoded in each plan from the one it was asked at up to `plan`, which is not included."""
        entry = member.entry
        self._queue.served(entry.key, plan - member.asked_at, is_batch=entry.is_batch)
