"""From resolved settings to the frozen config of each process: who runs, what it is called, whom it joins. Pure."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..core.config import GatewayConfig, NetworkConfig, SchedulerConfig, TransferConfig, WorkerConfig
from ..core.errors import ConfigurationError
from ..core.messages import Role
from ..gateway.keys import digest_of
from .model_facts import ModelFacts
from .options import EngineOptions, HostPort
from .placement import DeviceSlot, Placement
from .resolve import ResolvedEngine

MAX_WORKERS = 64
NCCL_GROUP_BYTES = 100 * 1024**2  # what the library keeps for a group of two: 52 to 100 MB are reported
PEERS_TO_COME = 2  # workers that may join a running server: each takes rings on its peers' cards
STAGED_IN_HOST_MEMORY = ("tcp", "shared_memory", "pinned_memory")


class Cluster(msgspec.Struct, frozen=True):
    """What all processes of one launcher share. `http` and `join` have real ports."""

    run_dir: str
    key_file: str
    http: HostPort
    join: HostPort
    served_model: str
    log_level: str
    debug: bool

    @property
    def join_addresses(self) -> tuple[str, ...]:
        """ipc first: workers of this host need no TCP to the gateway."""
        return (f"ipc://{Path(self.run_dir) / 'gateway.sock'}", f"tcp://{self.join.text}")


class GatewayOptions(msgspec.Struct, frozen=True):
    """What only a gateway is told. Its clients' keys (none: anybody may ask) and the folder of their batches."""

    api_keys: tuple[str, ...] = ()
    batch_dir: str = ""
    may_prefill_locally: bool = True


class WorkerPlace(msgspec.Struct, frozen=True):
    """One worker to start, and its part of a card; None: it computes on the CPU."""

    worker_id: str
    role: Role
    num_peers: int  # workers that it hands KV to or gets it from
    slot: DeviceSlot | None = None


def require_topology(num_prefill: int, num_decode: int) -> None:
    """Raises ConfigurationError for pools that cannot serve."""
    if num_decode < 1:
        raise ConfigurationError(f"--decode {num_decode}: at least one decode worker is needed to generate. Use 1.")
    if num_prefill < 0 or num_prefill + num_decode > MAX_WORKERS:
        raise ConfigurationError(
            f"--prefill {num_prefill} --decode {num_decode}: 0 to {MAX_WORKERS} workers in all can be started here. "
            "Start more on other machines with `baton decode --join`."
        )


def gateway_config(
    cluster: Cluster,
    model: ModelFacts,
    dtype: str,
    num_prefill: int,
    num_decode: int,
    options: EngineOptions,
    gateway: GatewayOptions | None = None,
) -> GatewayConfig:
    gateway = gateway or GatewayOptions()
    return GatewayConfig(
        gateway_id="gateway-0",
        served_model=cluster.served_model,
        model_folder=model.folder,
        model_digest=model.digest(dtype),
        host=cluster.http.host,
        port=cluster.http.port,
        bind=cluster.join_addresses,
        key_file=cluster.key_file,
        expected_prefill=num_prefill,
        expected_decode=num_decode,
        policy=options.policy,
        ttft_target_s=options.ttft_target_s,
        tpot_target_s=options.tpot_target_s,
        is_elastic=options.is_elastic,
        may_prefill_locally=gateway.may_prefill_locally,
        api_key_digests=tuple(map(digest_of, gateway.api_keys)),
        batch_dir=gateway.batch_dir,
        log_level=cluster.log_level,
        debug=cluster.debug,
    )


def local_worker_configs(
    cluster: Cluster, model: ModelFacts, resolved: ResolvedEngine, workers: Sequence[WorkerPlace]
) -> list[WorkerConfig]:
    """Workers that a launcher starts beside its gateway."""
    # Workers on other hosts reach these at the address the gateway is joined at.
    network = NetworkConfig(
        run_dir=cluster.run_dir,
        listen_host=cluster.join.host,
        join=cluster.join_addresses[:1],
        key_file=cluster.key_file,
    )
    return [
        worker_config(worker, cluster.served_model, model, resolved, network, cluster.log_level) for worker in workers
    ]


def worker_places(
    num_prefill: int, num_decode: int, placement: Placement | None, *, is_elastic: bool = False
) -> list[WorkerPlace]:
    """prefill-0.., decode-0.., on the CPU where there is no placement. Elastic ones hand over to all others."""
    prefill: Sequence[DeviceSlot | None] = placement.prefill if placement else [None] * num_prefill
    decode: Sequence[DeviceSlot | None] = placement.decode if placement else [None] * num_decode
    all_others = num_prefill + num_decode - 1
    return [
        WorkerPlace(f"{role}-{index}", role, all_others if is_elastic else num_peers, slot)
        for role, num_peers, slots in ((Role.PREFILL, num_decode, prefill), (Role.DECODE, num_prefill, decode))
        for index, slot in enumerate(slots)
    ]


def ring_size() -> int:
    """Bytes of the staging ring of one (sender, receiver) pair."""
    transfer = TransferConfig()
    return transfer.ring_slots * transfer.slot_bytes


def device_ring_bytes(transport: str, num_peers: int) -> int:
    """Memory of a worker's card for hand-overs: KV goes to each peer and, for returned prefixes, comes from each."""
    if transport in STAGED_IN_HOST_MEMORY:
        return 2 * TransferConfig().slot_bytes
    num_rings = 2 * (num_peers + PEERS_TO_COME)
    return num_rings * (ring_size() + (NCCL_GROUP_BYTES if transport == "nccl" else 0))


def worker_config(
    worker: WorkerPlace,
    served_model: str,
    model: ModelFacts,
    resolved: ResolvedEngine,
    network: NetworkConfig,
    log_level: str,
) -> WorkerConfig:
    engine = resolved.engine_config(
        decode=worker.role is Role.DECODE,
        share=worker.slot.share if worker.slot else 0.0,
        ring_bytes=device_ring_bytes(resolved.options.transport, worker.num_peers),
    )
    return WorkerConfig(
        worker_id=worker.worker_id,
        roles=(worker.role,),
        served_model=served_model,
        model_digest=model.digest(resolved.engine.dtype),
        context_length=resolved.context_length,
        engine=engine,
        prefill=_within(resolved.scheduler(decode=False), engine.token_budget),
        decode=_within(resolved.scheduler(decode=True), engine.token_budget),
        transfer=TransferConfig(transport=resolved.options.transport),
        network=network,
        context_may_shrink=resolved.context_may_shrink,
        device_uuid=worker.slot.gpu.uuid if worker.slot else "",
        device_name=worker.slot.gpu.name if worker.slot else "",
        log_level=log_level,
    )


def _within(scheduler: SchedulerConfig, most: int) -> SchedulerConfig:
    """On a card, no step of a role that comes later may be larger than those whose memory was measured (0: any)."""
    if not most or scheduler.token_budget <= most:
        return scheduler
    budgets = scheduler.token_budget_range
    return msgspec.structs.replace(
        scheduler,
        token_budget=most,
        chunk_size=min(scheduler.chunk_size, most),
        token_budget_range=(min(budgets[0], most), most) if budgets else None,
    )
