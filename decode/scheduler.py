"""DecodeScheduler: continuous batching. Who joins, who advances by how many tokens, who makes room. Lengths only."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..core.config import SchedulerConfig
from ..core.lifecycle import Phase
from ..core.sequence import Sequence
from ..core.step_cost import StepShape, chunk_products
from ..engine.chunk_planning import plan_chunks

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
    def shape(self) -> StepShape:
        """What the duration depends on; before the plan is launched, which makes its sequences longer."""
        return StepShape(
            num_prompt_tokens=sum(n for _, n in self.prompts),
            prompt_products=sum(chunk_products(s.num_launched_tokens, n) for s, n in self.prompts),
            num_decodes=len(self.decodes),
            decode_context=sum(s.num_tokens for s, _ in self.decodes),
        )


class DecodeScheduler:
    """Requests wait in order of arrival, join the batch when their blocks are there, and leave when they end.

    The batch mixes one-token decodes with chunks of prompts that are computed here, under one token budget; decodes
    come first, so a long prompt lengthens a step by at most the budget; prompts never get less than a share of it.
    When the pool is used up, the sequence that joined last goes back to the head of the queue: the oldest always
    moves, so the batch cannot stand still.

    A step costs the work that changed: a decode is looked at when its room may be used up, not at each step. Every
    plan that has chunks must be launched, which makes each of its decodes one token longer.
    """

    def __init__(self, config: SchedulerConfig):
        self._config = config
        self.max_running = config.max_running  # may be changed between plans, as may the prompt budget
        self.prompt_budget: int | None = None  # prompt tokens of a step; None: what decodes leave of the token budget
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}  # in order of joining; RECEIVING, COMPUTING and RUNNING ones
        self._joining: dict[str, Sequence] = {}  # those of them that have not decoded yet
        self._num_plans = 0
        self._ask_at: dict[str, int] = {}  # decoding request |-> number of the plan before which it is asked for room
        self._to_ask: dict[int, list[Sequence]] = {}  # the same, by plan; who has left since is skipped
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
    def num_waiting_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed here (those being handed over are another worker's work)."""
        computing = (s.num_uncomputed_tokens for s in self._joining.values() if s.phase is Phase.COMPUTING)
        return sum(s.num_tokens for s in self._waiting) + sum(computing)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._config.max_waiting

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def next_waiting(self) -> Sequence | None:
        """The request whose blocks should be found next, if another one may join."""
        if not self._waiting or len(self._running) >= self.max_running:
            return None
        return self._waiting[0]

    def admit(self, sequence: Sequence) -> None:
        assert self._waiting[0] is sequence
        self._waiting.popleft()
        self._running[sequence.request_id] = self._joining[sequence.request_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a request in any phase."""
        if sequence.request_id in self._running:
            self._leave(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def num_missing_blocks(self, missing_blocks: Callable[[Sequence], int]) -> int:
        """How many blocks the decodes of the next step need that they do not have."""
        return sum(missing_blocks(s) for s in self._due())

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
            self._leave(victim)
            preempt(victim)
            self._waiting.appendleft(victim)
            self.num_preemptions += 1

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

    def _prompts(self, num_decodes: int) -> list[tuple[Sequence, int]]:
        computing = [s for s in self._joining.values() if s.phase is Phase.COMPUTING]
        if not computing:
            return []
        # However many decode, prompts get a share: a steady batch must not starve those who wait to join it.
        left = max(self._config.token_budget - num_decodes, self._config.token_budget // MIN_PROMPT_SHARE, 1)
        budget = left if self.prompt_budget is None else self.prompt_budget
        counts = plan_chunks([s.num_uncomputed_tokens for s in computing], budget, self._config.chunk_size)
        return [(s, n) for s, n in zip(computing, counts, strict=True) if n]

    def _due(self) -> list[Sequence]:
        """Decodes to be asked for room before the next plan: their room may be used up, or they decode for the first
        time: the prompt is computed, or being computed up to its end (then the first token is pending).
        """
        number = self._num_plans + 1
        due = [
            s
            for s in self._to_ask.get(number, ())
            if self._ask_at.get(s.request_id) == number and self._running.get(s.request_id) is s
        ]
        return due + [s for s in self._joining.values() if s.phase is Phase.RUNNING or s.num_pending_tokens]

    def _ask(self, sequence: Sequence, room: Callable[[Sequence], int]) -> None:
        request_id = sequence.request_id
        num_tokens = room(sequence)
        ask_at = self._num_plans + max(num_tokens, 1)
        self._joining.pop(request_id, None)
        self._ask_at[request_id] = ask_at
        self._to_ask.setdefault(ask_at, []).append(sequence)
        if (num_tokens > 0) is not (request_id in self._with_room):
            self._with_room ^= {request_id}
            self._decodes = None

    def _leave(self, sequence: Sequence) -> None:
        request_id = sequence.request_id
        del self._running[request_id]
        self._joining.pop(request_id, None)
        self._ask_at.pop(request_id, None)
        if request_id in self._with_room:
            self._with_room.remove(request_id)
            self._decodes = None
