"""The yardstick: DistServe's own scheduling rules, written anew from their description. Not how Baton schedules.

An instance runs one step at a time and never preempts; when free it takes a prefill step if its prefill queue is not
empty, else a decode step. No chunks, no mixed steps, no limit on KV. tests/sim checks it against what the original
simulator printed (LLMServe/DistServe at 82831f1, Apache-2.0).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

DECODE_TOKENS = 50_000  # context tokens of one decode batch


@dataclass(frozen=True)
class Coefficients:
    """Milliseconds, of one device: (a, b, c) each."""

    prefill: tuple[float, float, float]
    decode_small: tuple[float, float, float]
    decode_large: tuple[float, float, float]
    large_batch: int
    max_tokens: int  # of one prefill batch

    def prefill_ms(self, lengths: Sequence[int]) -> float:
        a, b, c = self.prefill
        total = sum(lengths)
        return a + b * total + c * sum(n * n for n in lengths) + 1 + 2 + 1e-4 * total

    def decode_ms(self, contexts: Sequence[int]) -> float:
        a, b, c = self.decode_small if len(contexts) < self.large_batch else self.decode_large
        total = sum(contexts)
        return a + b * (total + len(contexts)) + c * len(contexts) + 2 + 1e-4 * total


@dataclass(eq=False)
class YardstickRequest:
    """Times in ms. TPOT includes what it waits between prefill and decode; the prefill token is not an output."""

    arrival: float
    prompt: int
    output: int
    first_token: float = 0.0
    finish: float = 0.0
    num_decoded: int = 0

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        return (self.finish - self.first_token) / self.output

    @property
    def context(self) -> int:
        return self.prompt + self.num_decoded


@dataclass(eq=False)
class _Instance:
    prefills: deque[YardstickRequest] = field(default_factory=deque)
    decodes: deque[YardstickRequest] = field(default_factory=deque)
    batch: list[YardstickRequest] = field(default_factory=list)
    is_prefill: bool = False

    @property
    def num_prefills(self) -> int:
        return len(self.prefills) + (len(self.batch) if self.is_prefill else 0)


class Yardstick:
    """`disaggregated`: one prefill and one decode instance; else two that do both."""

    def __init__(self, cost: Coefficients, disaggregated: bool):
        self._cost = cost
        first, second = _Instance(), _Instance()
        self._prefill = [first] if disaggregated else [first, second]
        self._decode = [second] if disaggregated else []
        self._events: list[tuple[float, int, _Instance | YardstickRequest]] = []
        self._serial = 0

    def run(self, arrivals_ms: Sequence[float], prompt: int, output: int) -> list[YardstickRequest]:
        requests = [YardstickRequest(arrival, prompt, output) for arrival in arrivals_ms]
        for request in requests:
            self._at(request.arrival, request)
        while self._events:
            now, _, what = heappop(self._events)
            if isinstance(what, _Instance):
                self._step_ended(what, now)
            else:
                instance = min(self._prefill, key=lambda i: i.num_prefills)
                instance.prefills.append(what)
                self._start(instance, now)
        return requests

    def _at(self, when: float, what: "_Instance | YardstickRequest") -> None:
        self._serial += 1
        heappush(self._events, (when, self._serial, what))

    def _start(self, instance: _Instance, now: float) -> None:
        if instance.batch:
            return
        instance.is_prefill = bool(instance.prefills)
        if instance.prefills:
            instance.batch = _take(instance.prefills, self._cost.max_tokens, lambda r: r.prompt)
            self._at(now + self._cost.prefill_ms([r.prompt for r in instance.batch]), instance)
        elif instance.decodes:
            instance.batch = _take(instance.decodes, DECODE_TOKENS, lambda r: r.context + 1)
            self._at(now + self._cost.decode_ms([r.context for r in instance.batch]), instance)

    def _step_ended(self, instance: _Instance, now: float) -> None:
        batch, instance.batch = instance.batch, []
        woken = {id(instance): instance}
        for request in batch:
            if instance.is_prefill:
                request.first_token = now
                target = min(self._decode, key=lambda i: len(i.decodes)) if self._decode else instance
                target.decodes.append(request)
                woken[id(target)] = target
                continue
            request.num_decoded += 1
            if request.num_decoded == request.output:
                request.finish = now
            else:
                instance.decodes.append(request)
        for other in woken.values():
            self._start(other, now)


def _take(
    queue: deque[YardstickRequest], budget: int, cost: Callable[[YardstickRequest], int]
) -> list[YardstickRequest]:
    """From the head, in order, while they fit."""
    batch: list[YardstickRequest] = []
    while queue and (tokens := cost(queue[0])) <= budget:
        budget -= tokens
        batch.append(queue.popleft())
    return batch
