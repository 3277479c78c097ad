"""PrefillScheduler: which prompts advance by how many tokens in the next step. Ids and lengths only."""

from collections import deque
from dataclasses import dataclass

from ..core.config import SchedulerConfig
from ..engine.chunk_planning import plan_chunks


@dataclass(frozen=True)
class PlannedChunk:
    request_id: str
    num_tokens: int
    is_last: bool  # the prompt is complete with it


class PrefillScheduler:
    """First come, first served; many prompts packed into one step up to the token budget.

    A request waits until its blocks are there (`next_waiting` / `admit`), then advances chunk by chunk (`plan` /
    `launched`). Order of admission is order of computation, so a long prompt delays those behind it by at most the
    chunks it still needs, never for ever.
    """

    def __init__(self, config: SchedulerConfig):
        self._config = config
        self.token_budget = config.token_budget  # may be changed between plans, as may the chunk size
        self.chunk_size = config.chunk_size
        self._waiting: deque[str] = deque()
        self._num_waiting_tokens: dict[str, int] = {}  # request_id |-> prompt tokens
        self._num_missing: dict[str, int] = {}  # request_id |-> tokens to compute, in order of admission

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._num_missing)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens accepted and not yet in a forward pass (cached ones of waiting prompts are not known yet)."""
        return sum(self._num_waiting_tokens.values()) + sum(self._num_missing.values())

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._config.max_waiting

    def add(self, request_id: str, num_tokens: int) -> None:
        self._waiting.append(request_id)
        self._num_waiting_tokens[request_id] = num_tokens

    def next_waiting(self) -> str | None:
        """The request whose blocks should be found next, if another one may run."""
        if not self._waiting or len(self._num_missing) >= self._config.max_running:
            return None
        return self._waiting[0]

    def admit(self, request_id: str, num_missing_tokens: int) -> None:
        """The head of the queue has its blocks and lacks that many tokens."""
        assert self._waiting[0] == request_id
        self._waiting.popleft()
        del self._num_waiting_tokens[request_id]
        self._num_missing[request_id] = num_missing_tokens

    def resume(self, request_id: str, num_missing_tokens: int) -> None:
        """A request that was admitted with nothing to compute yet lacks that many tokens now."""
        self._num_missing[request_id] = num_missing_tokens

    def plan(self) -> list[PlannedChunk]:
        missing = list(self._num_missing.items())
        counts = plan_chunks([n for _, n in missing], self.token_budget, self.chunk_size)
        return [PlannedChunk(r, n, n == left) for (r, left), n in zip(missing, counts, strict=True) if n]

    def launched(self, plan: list[PlannedChunk]) -> None:
        """A forward pass computes the plan; a prompt that is complete with it is forgotten here."""
        for chunk in plan:
            self._num_missing[chunk.request_id] -= chunk.num_tokens
            if chunk.is_last:
                del self._num_missing[chunk.request_id]

    def remove(self, request_id: str) -> None:
        """Forget a request in any phase; one that is not known is not an error."""
        if request_id in self._num_waiting_tokens:
            self._waiting.remove(request_id)
            del self._num_waiting_tokens[request_id]
        self._num_missing.pop(request_id, None)
