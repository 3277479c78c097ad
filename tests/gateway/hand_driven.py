"""A dispatcher with its real admission and placement, on a clock that a test moves. Workers are a list of messages."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.core.messages import GenerateRequest, Message, NodeRef, Role, Status, TokenChunk, WorkerInfo
from baton.core.queueing import FCFS, QueuePolicy
from baton.core.request import FinishReason, SamplingParams, Urgency
from baton.core.timeline import Timeline
from baton.gateway.admission import TICK_INTERVAL_S, Admission
from baton.gateway.dispatcher import Dispatcher
from baton.gateway.generation import Generation
from baton.gateway.membership import Membership
from baton.gateway.metrics import Metrics
from baton.gateway.placement import Placement
from baton.gateway.prompts import Prompt
from baton.radix_cache.index import PrefixIndexes

GATEWAY = NodeRef("gateway-0", 1)


def decode_info(name: str = "decode-0", **changes: Any) -> WorkerInfo:
    info = WorkerInfo(
        ref=NodeRef(name, 1),
        roles=(Role.DECODE,),
        pid=1,
        device="cpu",
        model="m",
        model_digest="digest",
        wire_digest="wire",
        host_digest="host",
        endpoints=("ipc://nowhere",),
        block_size=16,
        num_blocks=4096,
        context_length=8192,
        max_running=4,
        threads=1,
    )
    return msgspec.structs.replace(info, **changes)


def status(**settings: int) -> Status:
    return Status(*([0] * 15), settings=settings)


@dataclass
class HandDriven:
    """`predicted`: (wait_s, ttft_s) of every route, None: not known."""

    max_queue: int = 64
    max_queue_delay_s: float = 60.0
    policy: QueuePolicy = FCFS
    ttft_target_s: float | None = None
    predicted: Callable[[], tuple[float, float]] | None = None
    now: float = 0.0
    sent: list[tuple[NodeRef, Message]] = field(default_factory=list)
    unreachable: set[NodeRef] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.membership = Membership(GATEWAY, "", timeout_s=1e9)
        self.admission = Admission(self.max_queue, self.max_queue_delay_s, self.policy, self.ttft_target_s)
        self.metrics = Metrics(list)
        self.placement = Placement(self.membership, PrefixIndexes(), self.admission, self.metrics, expected_prefill=0)
        if self.predicted is not None:
            choose = self.placement.choose
            self.placement.choose = lambda generation, now: self._with_times(choose(generation, now))  # type: ignore
        self.dispatcher = Dispatcher(
            self.membership, self.placement, self.admission, self.metrics, self._send, clock=lambda: self.now
        )
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def _with_times(self, route: Any) -> Any:
        if route is None or self.predicted is None:
            return route
        wait_s, ttft_s = self.predicted()
        return msgspec.structs.replace(route, wait_s=wait_s, ttft_s=ttft_s)

    def _send(self, to: NodeRef, body: Message) -> bool:
        if to in self.unreachable:  # as gateway/cluster.py
            self.leave(to)
            return False
        self.sent.append((to, body))
        return True

    def join(self, info: WorkerInfo) -> NodeRef:
        self.membership.hello(info, self.now)
        self.dispatcher.worker_joined(info)
        return info.ref

    def leave(self, ref: NodeRef) -> None:
        worker = self.membership.workers.pop(ref, None)
        if worker is not None:
            self.dispatcher.worker_left(worker.info)

    def submit(self, num_tokens: int = 16, max_tokens: int = 16, urgency: Urgency = Urgency()) -> Generation:  # noqa: B008
        [generation] = self.submit_choices(1, num_tokens, max_tokens, urgency)
        return generation

    def submit_choices(
        self,
        num_choices: int,
        num_tokens: int = 16,
        max_tokens: int = 16,
        urgency: Urgency = Urgency(),  # noqa: B008
    ) -> list[Generation]:
        prompt = Prompt(list(range(num_tokens)), SamplingParams(max_tokens=max_tokens))
        return self.dispatcher.submit(prompt, "ns", Timeline(), asyncio.Event(), urgency, num_choices)

    def tell(self, generation: Generation, num_tokens: int = 1, reason: FinishReason | None = None) -> None:
        """Its decode worker sends the next tokens."""
        attempt = generation.attempt
        assert attempt is not None
        index = len(generation.output_token_ids)
        tokens = [7 + generation.choice] * num_tokens
        chunk = TokenChunk(attempt.request_id, generation.choice, index, tokens, reason, num_cached_tokens=0)
        self.dispatcher.handle(attempt.route.decode, chunk)

    def finish(self, generation: Generation, num_tokens: int = 1) -> None:
        self.tell(generation, num_tokens, FinishReason.STOP)

    @property
    def generates(self) -> list[GenerateRequest]:
        return [body for _, body in self.sent if isinstance(body, GenerateRequest)]

    # ---- time ------------------------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action))

    def run(self, until: float) -> None:
        """Events in their order, and a tick every TICK_INTERVAL_S."""
        while self.now < until:
            tick_at = min(self.now + TICK_INTERVAL_S, until)
            while self._events and self._events[0][0] <= tick_at:
                when, _, action = heapq.heappop(self._events)
                self.now = when
                action()
            self.now = tick_at
            self.dispatcher.tick(self.now)
