"""PrefillScheduler: which prompts advance by how many tokens in the next step. Ids and lengths only."""

from dataclasses import dataclass

from ..core.config import SchedulerConfig
from ..core.queueing import FCFS, Rank, Waiting, WaitingQueue
from ..worker.urgency import share_budget


@dataclass(frozen=True)
class PlannedChunk:
    request_id: str
    num_tokens: int
    is_last: bool  # the prompt is complete with it


@dataclass
class _Admitted:
    rank: Rank
    key: str
    num_missing: int  # tokens to compute


class PrefillScheduler:
    """Many prompts packed into one step up to the token budget, the most urgent first.

    A request waits in the order of the policy until its blocks are there (`next_waiting` / `admit`), then advances
    chunk by chunk (`plan` / `launched`). Among those of one rank, order of admission is order of computation, so a
    long prompt delays those behind it by at most the chunks it still needs; those of a higher class pass it
    (worker/urgency.py). Any policy but first come, first served also packs by length (worker/packing.py).
    """

    def __init__(self, config: SchedulerConfig):
        self._config = config
        self.token_budget = config.token_budget  # may be changed between plans, as may the chunk size
        self.chunk_size = config.chunk_size
        self._packs = config.policy != FCFS
        self._queue = WaitingQueue(config.policy)
        self._admitted: dict[str, _Admitted] = {}  # in order of admission

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._admitted)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens accepted and not yet in a forward pass, but for those that a cache had when they came."""
        return self._queue.num_tokens + sum(prompt.num_missing for prompt in self._admitted.values())

    @property
    def is_full(self) -> bool:
        return len(self._queue) >= self._config.max_waiting

    def add(self, entry: Waiting) -> None:
        self._queue.push(entry)

    def next_waiting(self, now: float) -> str | None:
        """The request whose blocks should be found next, if another one may run.

        Less urgent ones that run take no place away from it: they would be in its way for as long as they are paused.
        """
        entry = self._queue.peek(now)
        if entry is None:
            return None
        rank = self._queue.rank(entry.request_id)
        num_before = sum(prompt.rank <= rank for prompt in self._admitted.values())
        return entry.request_id if num_before < self._config.max_running else None

    def yields(self, request_id: str, to: str) -> bool:
        """Is it less urgent than `to`, which waits, and so paused for the likes of it? No when it was not admitted."""
        prompt = self._admitted.get(request_id)
        return prompt is not None and prompt.rank > self._queue.rank(to)

    def admit(self, request_id: str, num_missing_tokens: int) -> None:
        """The next one has its blocks and lacks that many tokens. Raises KeyError when it does not wait."""
        rank, entry = self._queue.rank(request_id), self._queue.remove(request_id)
        assert entry is not None
        self._admitted[request_id] = _Admitted(rank, entry.key, 0)
        self.resume(request_id, num_missing_tokens)

    def resume(self, request_id: str, num_missing_tokens: int) -> None:
        """A request that was admitted with nothing to compute yet lacks that many tokens now."""
        prompt = self._admitted[request_id]
        prompt.num_missing = num_missing_tokens
        self._queue.served(prompt.key, num_missing_tokens, is_batch=prompt.rank.is_batch)

    def plan(self, token_budget: int | None = None) -> list[PlannedChunk]:
        """The next forward pass, of at most `token_budget` tokens (None: this scheduler's own)."""
        counts = share_budget(
            [prompt.num_missing for prompt in self._admitted.values()],
            [prompt.rank for prompt in self._admitted.values()],
            self.token_budget if token_budget is None else token_budget,
            self.chunk_size,
            packs=self._packs,
        )
        admitted = zip(self._admitted.items(), counts, strict=True)
        return [PlannedChunk(r, n, n == prompt.num_missing) for (r, prompt), n in admitted if n]

    def launched(self, plan: list[PlannedChunk]) -> None:
        """A forward pass computes the plan; a prompt that is complete with it is forgotten here."""
        for chunk in plan:
            self._admitted[chunk.request_id].num_missing -= chunk.num_tokens
            if chunk.is_last:
                del self._admitted[chunk.request_id]

    def remove(self, request_id: str) -> None:
        """Forget a request in any phase; one that is not known is not an error."""
        self._queue.remove(request_id)
        self._admitted.pop(request_id, None)
