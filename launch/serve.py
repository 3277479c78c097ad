"""`baton serve` and `baton gateway`: resolve everything, start the processes, say when the server is ready."""

import asyncio
import contextlib
import dataclasses
import sys
import time
from pathlib import Path

import msgspec

from ..core.config import WorkerConfig
from ..core.errors import BatonError, ConfigurationError
from ..transfer.keys import ClusterKeys
from ..vocab.progress import default_progress
from ..vocab.source import default_cache_dir, resolve_model
from .api_keys import read_api_keys
from .batch_folder import batch_folder
from .child_process import ChildSpec, child_spec
from .compute import Compute, obstacles, require_nccl_pairs, resolve_compute, resolve_device, resolve_gateway_dtype
from .machine import Machine, describe_machine
from .model_facts import ModelFacts, read_model_facts
from .network import claim_port, http_get
from .options import (
    LOG_LEVELS,
    CommonFlags,
    EngineFlags,
    EngineOptions,
    GatewayFlags,
    HostPort,
    PoolFlags,
    SchedulingFlags,
    parse_engine_options,
    parse_host_port,
    parse_local_prefill,
    require_choice,
    require_port,
)
from .placement import Placement, choose_gpus, place_workers
from .resolve import require_weights_fit, resolve_engine
from .run_dir import run_directory
from .start_table import curl_line, join_line, url_of, write_start_table
from .supervisor import Supervisor
from .topology import (
    Cluster,
    GatewayOptions,
    gateway_config,
    local_worker_configs,
    require_topology,
    ring_size,
    worker_places,
)
from .worker_report import WorkerReport, memory_lines, read_reports, table_row

READY_TIMEOUT_S = 600.0
PATIENCE_S = 10.0  # a line about what is missing this often
POLL_INTERVAL_S = 0.05
PROBE_TIMEOUT_S = 2.0
REPORT_TIMEOUT_S = 10.0  # the gateway itself waits for workers in the middle of a step
WITHOUT_RING_FILES = ("tcp", "gloo", "nccl")


class Plan(msgspec.Struct, frozen=True):
    """Everything that is decided before the first process starts."""

    cluster: Cluster
    specs: tuple[ChildSpec, ...]
    model_argument: str | None
    ready_path: str  # answers 200 when the start table may be shown
    ready_timeout_s: float
    api_keys: tuple[str, ...] = ()


def serve(model: str | None, pools: PoolFlags, engine: EngineFlags, gateway: GatewayFlags, common: CommonFlags) -> None:
    """Run a whole server on this machine until a signal ends it. Raises BatonError when it cannot go on."""
    require_topology(pools.prefill, pools.decode)
    require_choice("--log-level", common.log_level, LOG_LEVELS)
    api_keys, may_prefill_locally = read_api_keys(gateway.api_key), parse_local_prefill(gateway)
    options = parse_engine_options(engine)
    http, join = claim_addresses(gateway)
    machine = describe_machine()
    compute, placement = choose_devices(options, pools, machine)
    facts = find_model(model)
    resolved = resolve_engine(options, compute, machine, facts, pools.prefill + pools.decode)
    workers = worker_places(pools.prefill, pools.decode, placement, is_elastic=options.is_elastic)
    require_weights_fit(facts, compute.dtype, [worker.slot for worker in workers if worker.slot])
    for line in (*compute.notes, *resolved.explanation, *(placement.lines if placement else ())):
        write_line(line)
    ring_bytes = 0 if options.transport in WITHOUT_RING_FILES else pools.prefill * pools.decode * ring_size()
    with run_directory(ring_bytes) as run_dir:
        key_file = run_dir / "cluster.key"
        ClusterKeys.create(key_file)
        cluster = make_cluster(run_dir, key_file, http, join, gateway.served_model_name or facts.name, common)
        configs = local_worker_configs(cluster, facts, resolved, workers)
        batches = batch_folder(gateway.batch_dir, cluster.served_model, http.port)
        own = GatewayOptions(api_keys, batches, may_prefill_locally)
        specs = (
            child_spec(gateway_config(cluster, facts, compute.dtype, pools.prefill, pools.decode, options, own)),
            *(child_spec(config) for config in configs),
        )
        run_plan(Plan(cluster, specs, model, "/ready", READY_TIMEOUT_S, api_keys))


def choose_devices(options: EngineOptions, pools: PoolFlags, machine: Machine) -> tuple[Compute, Placement | None]:
    """What computes, and on a GPU which worker has which card. Raises ConfigurationError for what cannot be."""
    device, _ = resolve_device(options.device, machine)
    if device == "cpu":
        compute = resolve_compute(options, machine)
        for option, devices in (
            ("--prefill-devices", pools.prefill_devices),
            ("--decode-devices", pools.decode_devices),
        ):
            if devices != "auto":
                why = "--device cpu" if options.device == "cpu" else obstacles(machine)[0].text
                raise ConfigurationError(f"{option} {devices} names cards, but the workers run on the CPU: {why}.")
        return compute, None
    cards = choose_gpus(f"--device cuda:{options.card}", options.card, machine.cards.gpus) or machine.cards.gpus
    placement = place_workers(pools.prefill, pools.decode, cards, pools.prefill_devices, pools.decode_devices)
    require_nccl_pairs(options.transport, placement)
    return resolve_compute(options, machine.with_gpus(placement.gpus)), placement


def serve_gateway(
    model: str | None,
    key_file: Path | None,
    dtype: str,
    scheduling: SchedulingFlags,
    gateway: GatewayFlags,
    common: CommonFlags,
) -> None:
    """Run a gateway alone; workers join it. The key file is made when there is none."""
    require_choice("--log-level", common.log_level, LOG_LEVELS)
    options = parse_engine_options(EngineFlags(dtype=dtype, **dataclasses.asdict(scheduling)))
    api_keys, may_prefill_locally = read_api_keys(gateway.api_key), parse_local_prefill(gateway)
    dtype = resolve_gateway_dtype(options.dtype, describe_machine())
    http, join = claim_addresses(gateway)
    facts = find_model(model)
    with run_directory(0) as run_dir:
        key_file = key_file or run_dir / "cluster.key"
        if not key_file.exists():
            ClusterKeys.create(key_file)
        cluster = make_cluster(run_dir, key_file, http, join, gateway.served_model_name or facts.name, common)
        batches = batch_folder(gateway.batch_dir, cluster.served_model, http.port)
        own = GatewayOptions(api_keys, batches, may_prefill_locally)
        config = gateway_config(cluster, facts, dtype, 0, 1, options, own)
        # Its readiness is up to workers that others start, so the table appears when it answers at all.
        run_plan(Plan(cluster, (child_spec(config),), model, "/health", READY_TIMEOUT_S, api_keys))


def find_model(model: str | None) -> ModelFacts:
    source = resolve_model(model, default_cache_dir(), default_progress())
    return read_model_facts(source.name, source.folder, source.quantisation_note)


def claim_addresses(gateway: GatewayFlags) -> tuple[HostPort, HostPort]:
    """Where HTTP clients and where workers connect, with real ports."""
    require_port("--port", gateway.port)
    join = parse_host_port("--join-address", gateway.join_address)
    if join.host in ("0.0.0.0", "::"):
        raise ConfigurationError(
            f"--join-address {gateway.join_address}: joining workers are told this address, so it must be one that "
            "they can reach. Name the address of this machine."
        )
    return claim_port("--port", HostPort(gateway.host, gateway.port)), claim_port("--join-address", join)


def make_cluster(
    run_dir: Path, key_file: Path, http: HostPort, join: HostPort, served_model: str, common: CommonFlags
) -> Cluster:
    return Cluster(
        run_dir=str(run_dir),
        key_file=str(key_file.absolute()),
        http=http,
        join=join,
        served_model=served_model,
        log_level="debug" if common.debug else common.log_level,
        debug=common.debug,
    )


def run_plan(plan: Plan) -> None:
    asyncio.run(_run(plan))


async def _run(plan: Plan) -> None:
    supervisor = Supervisor(plan.specs, write_line)

    async def announce() -> None:
        await wait_ready(plan)
        reports = await worker_reports(plan)
        rows = [table_row(spec, supervisor.pids.get(spec.name, 0), reports.get(spec.name)) for spec in plan.specs]
        write_start_table(rows, [*memory_lines(reports), *hints(plan)], sys.stdout)

    await supervisor.run(announce)


async def wait_ready(plan: Plan) -> None:
    """Poll the gateway; say every PATIENCE_S what it waits for. Raises BatonError after the plan's bound."""
    started = time.monotonic()
    next_word = started + PATIENCE_S
    while True:
        try:
            status, body = await http_get(plan.cluster.http, plan.ready_path, PROBE_TIMEOUT_S)
        except (OSError, TimeoutError):
            status, body = 0, "the gateway does not answer yet"
        if status == 200:
            return
        now = time.monotonic()
        if now - started > plan.ready_timeout_s:
            raise BatonError(f"not ready after {plan.ready_timeout_s:.0f} s: {body[:300]}. Try --log-level debug.")
        if now >= next_word:
            write_line(f"still starting after {now - started:.0f} s: {body[:300]}")
            next_word = now + PATIENCE_S
        await asyncio.sleep(POLL_INTERVAL_S)


async def worker_reports(plan: Plan) -> dict[str, WorkerReport]:
    """What the workers say of themselves, by id; empty when the gateway has fallen silent again."""
    try:
        _, body = await http_get(plan.cluster.http, "/workers", REPORT_TIMEOUT_S, (*plan.api_keys, "")[0])
        return read_reports(body)
    except (OSError, TimeoutError, msgspec.DecodeError) as error:
        write_line(f"warning: no word from the gateway about its workers ({error!r:.200})")
        return {}


def hints(plan: Plan) -> list[str]:
    cluster = plan.cluster
    where = f"{cluster.served_model} at {url_of(cluster.http)}/v1"
    if not any(isinstance(spec.config, WorkerConfig) for spec in plan.specs):
        return [
            f"ready: {where}, as soon as workers have joined",
            f"add a prefill worker: {join_line('prefill', cluster.join, cluster.key_file, plan.model_argument)}",
            f"add a decode worker: {join_line('decode', cluster.join, cluster.key_file, plan.model_argument)}",
        ]
    return [
        f"ready: {where}",
        f"try it: {curl_line(cluster.http, cluster.served_model, needs_key=bool(plan.api_keys))}",
        f"add a worker: {join_line('decode', cluster.join, cluster.key_file, plan.model_argument)}",
    ]


def write_line(text: str) -> None:
    """One line on stderr, in one write: lines of several children do not mix."""
    with contextlib.suppress(OSError):  # the terminal is gone: there is nobody to tell, and the server goes on
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
