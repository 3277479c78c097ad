"""Credit: how many requests a decode worker is given at a time, and who waits for it. Pure; the time comes in.

A request needs blocks for its prompt and for the growth that is to be expected, min(max_tokens, EXPECTED_GROWTH)
tokens. The sum over the requests in flight on a worker stays within its pool, and their number within its max_running.
Whoever gets no credit waits in one queue, first come first served, which has a bound in length and in time.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from ..core.errors import LocalProtocolError
from ..core.messages import NodeRef

EXPECTED_GROWTH = 256  # tokens; longer answers are rare, and the worker can preempt
_RATE_WINDOW_S = 10.0
_SHORTEST_RETRY_S = 1
_LONGEST_RETRY_S = 60


@dataclass
class _Credit:
    """One decode worker."""

    block_size: int
    num_blocks: int
    max_running: int
    blocks_in_flight: int = 0
    requests_in_flight: int = 0

    def blocks_for(self, num_tokens: int, max_tokens: int) -> int:
        return -(-(num_tokens + min(max_tokens, EXPECTED_GROWTH)) // self.block_size)

    def covers(self, num_tokens: int, max_tokens: int) -> bool:
        if self.requests_in_flight >= self.max_running:
            return False
        return self.blocks_in_flight + self.blocks_for(num_tokens, max_tokens) <= self.num_blocks


@dataclass
class Admission:
    """Credits and the queue. Requests are named by their ids."""

    max_queue: int
    max_queue_delay_s: float
    _credits: dict[NodeRef, _Credit] = field(default_factory=dict)
    _held: dict[str, tuple[NodeRef, int]] = field(default_factory=dict)  # request |-> (worker, blocks)
    _queue: OrderedDict[str, float] = field(default_factory=OrderedDict)  # request |-> when it came
    _releases: deque[float] = field(default_factory=deque)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_in_flight(self) -> int:
        return len(self._held)

    # ---- credits ------------------------------------------------------------------------------------------------

    def add_worker(self, ref: NodeRef, *, block_size: int, num_blocks: int, max_running: int) -> None:
        self._credits[ref] = _Credit(block_size, num_blocks, max_running)

    def remove_worker(self, ref: NodeRef) -> None:
        """Its credit goes; the requests that held some must still be released."""
        self._credits.pop(ref, None)

    def with_credit(self, num_tokens: int, max_tokens: int) -> list[NodeRef]:
        """Decode workers that can take a request of `num_tokens` which may generate `max_tokens`."""
        return [ref for ref, credit in self._credits.items() if credit.covers(num_tokens, max_tokens)]

    def take(self, request_id: str, ref: NodeRef, num_tokens: int, max_tokens: int) -> None:
        """Raises LocalProtocolError when the request holds credit already or the worker has none for it."""
        credit = self._credits.get(ref)
        if request_id in self._held or credit is None or not credit.covers(num_tokens, max_tokens):
            raise LocalProtocolError(f"no credit for request {request_id} on {ref.node_id}")
        blocks = credit.blocks_for(num_tokens, max_tokens)
        credit.blocks_in_flight += blocks
        credit.requests_in_flight += 1
        self._held[request_id] = (ref, blocks)

    def release(self, request_id: str, now: float) -> None:
        """Raises LocalProtocolError when the request holds no credit: it is given back exactly once."""
        if request_id not in self._held:
            raise LocalProtocolError(f"request {request_id} holds no credit to give back")
        ref, blocks = self._held.pop(request_id)
        self._releases.append(now)
        self._forget_old_releases(now)
        if (credit := self._credits.get(ref)) is not None:
            credit.blocks_in_flight -= blocks
            credit.requests_in_flight -= 1

    # ---- queue --------------------------------------------------------------------------------------------------

    @property
    def head(self) -> str | None:
        """Whose turn it is."""
        return next(iter(self._queue), None)

    @property
    def is_full(self) -> bool:
        return len(self._queue) >= self.max_queue

    def enqueue(self, request_id: str, now: float, *, first: bool = False) -> None:
        """At the end; a request whose worker died goes `first`, for its client has tokens already."""
        self._queue[request_id] = now
        if first:
            self._queue.move_to_end(request_id, last=False)

    def dequeue(self, request_id: str) -> None:
        """Nothing happens when it does not wait."""
        self._queue.pop(request_id, None)

    def expired(self, now: float) -> list[str]:
        """Those that have waited for longer than allowed."""
        return [request_id for request_id, since in self._queue.items() if now - since > self.max_queue_delay_s]

    def retry_after(self, now: float) -> int:
        """Seconds until a new request can expect credit: the queue's length over the rate of the last releases."""
        self._forget_old_releases(now)
        if not self._releases:
            return math.ceil(min(self.max_queue_delay_s, _RATE_WINDOW_S)) or _SHORTEST_RETRY_S
        rate = len(self._releases) / _RATE_WINDOW_S
        seconds = math.ceil((len(self._queue) + 1) / rate)
        return min(max(seconds, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)

    def _forget_old_releases(self, now: float) -> None:
        while self._releases and now - self._releases[0] > _RATE_WINDOW_S:
            self._releases.popleft()
