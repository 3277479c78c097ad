"""SimGateway: the production dispatcher, placement, router, admission and prefix index, under virtual time.

Requests come in as from HTTP handlers; what clients would see of them is written into their records.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ..core.messages import CacheSnapshot, Message, NodeRef, WorkerInfo
from ..core.queueing import QueuePolicy
from ..core.request import SamplingParams
from ..core.timeline import Timeline
from ..gateway.admission import TICK_INTERVAL_S, Admission
from ..gateway.cache_feed import CacheFeed
from ..gateway.dispatcher import Dispatcher
from ..gateway.generation import Generation, Unavailable
from ..gateway.membership import Membership
from ..gateway.metrics import Metrics
from ..gateway.placement import Placement
from ..gateway.prompts import Prompt
from ..gateway.role_rules import role_rule
from ..gateway.role_table import RoleTable
from ..radix_cache.index import PrefixIndexes
from .clock import VirtualClock
from .network import SimNetwork
from .record import SimRecord
from .workload import SimRequest

NAMESPACE = "sim"


class _Changed(asyncio.Event):
    """Calls back instead of waking a waiting handler: there is no event loop here."""

    callback: Callable[[], None] | None = None

    def set(self) -> None:
        if self.callback is not None:
            self.callback()


@dataclass(frozen=True)
class SimGatewayConfig:
    """What matters here of core's GatewayConfig."""

    max_queue: int
    max_queue_delay_s: float
    policy: QueuePolicy
    ttft_target_s: float | None
    tpot_target_s: float | None
    is_elastic: bool


class SimGateway:
    def __init__(self, clock: VirtualClock, network: SimNetwork, config: SimGatewayConfig):
        self.ref = NodeRef("gateway-0", 1)
        self.admission = Admission(config.max_queue, config.max_queue_delay_s, config.policy, config.ttft_target_s)
        self.records: list[SimRecord] = []
        self._clock = clock
        self._network = network
        self._membership = Membership(self.ref, "", timeout_s=float("inf"))
        index = PrefixIndexes()
        metrics = Metrics(list)
        self._placement = Placement(
            self._membership, index, self.admission, metrics, expected_prefill=0, tpot_target_s=config.tpot_target_s
        )
        self.dispatcher = Dispatcher(
            self._membership, self._placement, self.admission, metrics, self._send, clock=clock.read
        )
        self._cache_feed = CacheFeed(index, self._send)
        rule = role_rule(self._placement, config.ttft_target_s, config.tpot_target_s) if config.is_elastic else None
        self._roles = RoleTable(self._membership, self._send, metrics, rule, clock.read)
        self._is_elastic = config.is_elastic
        self.expects_more = False  # requests
        self._is_ticking = False
        network.join(self.ref, self.handle)

    @property
    def role_changes(self) -> list[dict[str, object]]:
        """As `GET /roles` has them."""
        return self._roles.changes

    def worker_joined(self, info: WorkerInfo) -> None:
        self._membership.hello(info, self._clock.now)
        self._cache_feed.worker_joined(info)
        self._cache_feed.handle(info.ref, CacheSnapshot(0, []))
        self.dispatcher.worker_joined(info)

    def submit(self, request: SimRequest) -> None:
        """A request arrives now."""
        record = SimRecord(request.index, self._clock.now, request.num_prompt_tokens)
        self.records.append(record)
        if request.num_prompt_tokens + request.max_tokens > self._placement.limits(0).max_tokens:
            record.status, record.ended_s = 400, self._clock.now  # as gateway/prompts.py
            return
        sampling = SamplingParams(seed=request.index, max_tokens=request.max_tokens)
        prompt = Prompt(request.prompt_token_ids(), sampling)
        changed = _Changed()
        try:
            [generation] = self.dispatcher.submit(prompt, NAMESPACE, Timeline(), changed, request.urgency)
        except Unavailable as error:
            self._refuse(record, error)
            return
        changed.callback = lambda: self._update(record, generation)
        changed.set()  # it may have been placed, or refused, at once
        self._tick_while_needed()

    def handle(self, sender: NodeRef, message: Message) -> None:
        """As Cluster does it; a membership in which nobody falls silent asks for nothing to be sent."""
        self._membership.heard(sender, message, self._clock.now)
        self._cache_feed.handle(sender, message)
        self.dispatcher.handle(sender, message)
        self._roles.handle(sender, message)

    def _send(self, receiver: NodeRef, message: Message) -> bool:
        self._network.send(self.ref, receiver, message)
        return True

    def _update(self, record: SimRecord, generation: Generation) -> None:
        if generation.error is not None:
            self._refuse(record, generation.error)
            return
        num_tokens = len(generation.output_token_ids)
        if num_tokens > record.output_tokens:
            if not record.output_tokens:
                record.first_token_s = self._clock.now
                record.cached_tokens = generation.num_cached_tokens or 0
            record.output_tokens, record.last_token_s = num_tokens, self._clock.now
        if generation.finish_reason is not None:
            record.status, record.ended_s = 200, self._clock.now

    def _refuse(self, record: SimRecord, error: Unavailable) -> None:
        record.status, record.retry_after_s, record.ended_s = error.status, error.retry_after, self._clock.now

    def _tick_while_needed(self) -> None:
        """Periodic checks, as in production, but that there are none while nothing can come of them."""
        if not self._is_ticking:
            self._is_ticking = True
            self._clock.after(TICK_INTERVAL_S, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        self.dispatcher.tick(self._clock.now)
        self._roles.tick(self._clock.now)
        is_awaited = self._is_elastic and self.expects_more  # roles change while nobody is there, too
        if self.dispatcher.num_in_flight or self.dispatcher.num_queued or is_awaited:
            self._tick_while_needed()
