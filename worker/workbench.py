"""Workbench: the parts of one worker that its roles share, built once per process."""

import contextlib
import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from ..core.config import WorkerConfig
from ..core.errors import ConfigurationError
from ..core.ledger import Ledger
from ..core.messages import Message, NodeRef, Role, Status, WorkerInfo
from ..engine.engine import Engine, load_engine
from ..radix_cache.cache import RadixCache
from ..transfer.channels import PeerUnreachable, WorkerChannels
from ..transfer.keys import ClusterKeys
from ..transfer.link import KVLink
from .cache_reporter import CacheReporter
from .role_share import RoleShare
from .sequence_blocks import SequenceBlocks
from .step_watch import StepWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workbench:
    config: WorkerConfig
    info: WorkerInfo
    engine: Engine
    blocks: SequenceBlocks
    channels: WorkerChannels
    link: KVLink
    reporter: CacheReporter
    share: RoleShare
    steps: StepWatch = field(default_factory=StepWatch)
    counters: Counter[str] = field(default_factory=Counter)  # num_tokens_generated, num_handover_failures

    @property
    def cache(self) -> RadixCache:
        return self.blocks.cache

    def tell(self, node: NodeRef, body: Message) -> None:
        """Send. A node that cannot be reached is found out by its silence; what hangs on it is dropped then."""
        try:
            self.channels.send(node, body)
        except PeerUnreachable as error:
            logger.debug("a message to %s was not sent: %s", node.node_id, error)

    def ledger(self, num_requests: int) -> Ledger:
        """Who owns the blocks of this worker right now."""
        link = self.link.counts()
        return msgspec.structs.replace(
            self.cache.ledger(),
            requests=num_requests,
            senders=link.senders,
            receivers=link.receivers,
            ring_slots_in_use=link.ring_slots_in_use,
        )

    def status(
        self,
        num_waiting: int,
        num_running: int,
        num_waiting_tokens: int,
        num_preemptions: int,
        settings: dict[str, int],
        peers: Iterable[WorkerInfo],
        roles: tuple[Role, ...],
    ) -> Status:
        states, link = self.cache.pool.counts(), self.link.counts()
        return Status(
            num_waiting=num_waiting,
            num_running=num_running,
            num_waiting_tokens=num_waiting_tokens,
            free_blocks=states.free,
            reserved_blocks=states.reserved,
            private_blocks=states.private,
            cached_blocks=states.cached,
            quarantined_blocks=states.quarantined,
            available_blocks=self.cache.num_available,
            num_tokens_computed=self.engine.runner.num_tokens_computed,
            num_tokens_generated=self.counters["num_tokens_generated"],
            num_preemptions=num_preemptions,
            num_kv_bytes_sent=link.bytes_sent,
            num_kv_bytes_received=link.bytes_received,
            num_handover_failures=self.counters["num_handover_failures"],
            transports=self._transports(peers),
            step_cost=self.steps.learned,
            steps=self.steps.totals,
            settings=settings,
            roles=roles,
        )

    def _transports(self, peers: Iterable[WorkerInfo]) -> dict[str, str]:
        """Peer |-> how its KV comes here; without those whose KV cannot come. Roles change: any peer's may."""
        found = {}
        for peer in peers:
            with contextlib.suppress(PeerUnreachable, ConfigurationError):  # its hand-overs say why
                found[peer.ref.node_id] = self.link.transport_of(peer.ref)
        return found


def build_workbench(config: WorkerConfig) -> Workbench:
    """Load the model, allocate the pool, open the sockets. Raises ConfigurationError for what cannot be done."""
    engine = load_engine(config.engine)
    ref = NodeRef(config.worker_id, secrets.randbits(63))
    channels = WorkerChannels(config.network, ref, ClusterKeys.load(config.network.key_file))
    num_blocks, block_size = engine.num_blocks, config.engine.block_size
    info = WorkerInfo(
        ref=ref,
        roles=config.roles,
        pid=os.getpid(),
        device=config.device_name or config.engine.device,
        model=config.served_model,
        model_digest=config.model_digest,
        wire_digest=engine.layout.wire_digest,
        host_digest=channels.host_digest,
        endpoints=channels.endpoints,
        block_size=block_size,
        num_blocks=num_blocks,
        context_length=fit_context(config, num_blocks * block_size),
        max_running=config.decode.max_running,
        threads=config.engine.threads,
        device_kind=config.engine.device,
        device_uuid=config.device_uuid,
        memory_note=engine.memory_note,
        policy=config.decode.policy,
        targets_s=(config.prefill.ttft_target_s, config.decode.tpot_target_s),
    )
    blocks = SequenceBlocks(RadixCache(num_blocks, block_size), block_size)
    link = KVLink(channels, engine.pool, engine.layout, config.transfer, config.network.run_dir, info)
    share = RoleShare(num_blocks, has_target=config.decode.tpot_target_s is not None)
    return Workbench(config, info, engine, blocks, channels, link, CacheReporter(blocks.cache, channels), share)


def fit_context(config: WorkerConfig, pool_tokens: int) -> int:
    """The longest request this worker takes. Raises ConfigurationError when the user fixed more than the pool holds."""
    if config.context_length <= pool_tokens or config.context_may_shrink:
        return min(config.context_length, pool_tokens)
    raise ConfigurationError(
        f"--context-length {config.context_length} is more than the KV cache of {config.worker_id} holds "
        f"({pool_tokens} tokens). Ask for less, or give the worker a card, or more of one, for itself."
    )
