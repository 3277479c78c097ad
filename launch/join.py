"""`baton prefill` and `baton decode`: one worker in this process, joined to gateways that run elsewhere."""

import os
import secrets
import signal
from pathlib import Path

import msgspec

from ..core.config import NetworkConfig, WorkerConfig
from ..core.errors import ConfigurationError
from ..core.messages import Role
from ..transfer.keys import ClusterKeys
from .child import MAX_CONFIG_BYTES
from .child_process import child_spec
from .compute import Compute, resolve_compute, resolve_device
from .machine import Machine, describe_machine
from .network import address_towards
from .options import (
    LOG_LEVELS,
    CommonFlags,
    EngineFlags,
    EngineOptions,
    HostPort,
    parse_engine_options,
    parse_host_port,
    require_choice,
)
from .placement import choose_gpus, place_workers
from .resolve import require_weights_fit, resolve_engine
from .serve import find_model, write_line
from .topology import WorkerPlace, worker_config


def join(
    role: Role,
    model: str | None,
    addresses: str,
    key_file: Path,
    engine: EngineFlags,
    common: CommonFlags,
) -> None:
    """Become a worker of a running server; does not return. Raises ConfigurationError for what cannot be done."""
    require_choice("--log-level", common.log_level, LOG_LEVELS)
    gateways = [parse_host_port("--join", address) for address in addresses.split(",")]
    ClusterKeys.load(key_file)  # before the model is looked for
    config = joined_worker_config(role, model, gateways, key_file, engine, common)
    write_line(f"{config.worker_id} joins {', '.join(config.network.join)}; Ctrl-C drains it")
    become_worker(config)


def joined_worker_config(
    role: Role,
    model: str | None,
    gateways: list[HostPort],
    key_file: Path,
    engine: EngineFlags,
    common: CommonFlags,
) -> WorkerConfig:
    if any(gateway.port == 0 for gateway in gateways):
        raise ConfigurationError("--join needs the port that the launcher printed, not 0.")
    options, machine = parse_engine_options(engine), describe_machine()
    compute, place = place_joined(role, options, machine)
    facts = find_model(model)
    # Over loopback the server's own workers compute on this machine already: half of the cores are theirs.
    threads_taken = machine.cores // 2 if gateways[0].is_loopback else 0
    resolved = resolve_engine(options, compute, machine, facts, 1, threads_taken)
    require_weights_fit(facts, compute.dtype, [place.slot] if place.slot else [])
    for line in (*compute.notes, *resolved.explanation):
        write_line(line)
    network = NetworkConfig(
        run_dir="",
        listen_host=address_towards(gateways[0]),
        join=tuple(f"tcp://{gateway.text}" for gateway in gateways),
        key_file=str(key_file.absolute()),
    )
    log_level = "debug" if common.debug else common.log_level
    return worker_config(place, facts.name, facts, resolved, network, log_level)


def place_joined(role: Role, options: EngineOptions, machine: Machine) -> tuple[Compute, WorkerPlace]:
    """One worker: on the card that --device names, else on the one with the most free memory, or on the CPU."""
    worker_id = f"{role}-{secrets.token_hex(3)}"
    device, _ = resolve_device(options.device, machine)
    if device == "cpu":
        return resolve_compute(options, machine), WorkerPlace(worker_id, role, 0)
    cards = choose_gpus(f"--device cuda:{options.card}", options.card, machine.cards.gpus) or machine.cards.gpus
    card = max(cards, key=lambda gpu: gpu.free_bytes)  # the first one among equals
    placement = place_workers(0, 1, [card])
    for line in (*placement.warnings, f"card: {placement.decode[0].share:.0%} of {card.text}"):
        write_line(line)
    return resolve_compute(options, machine.with_gpus((card,))), WorkerPlace(worker_id, role, 0, placement.decode[0])


def become_worker(config: WorkerConfig) -> None:
    """Replace this process: torch must be imported with the thread counts in its environment.

    The new program gets both ends of its config pipe, so the pipe never closes before it does.
    """
    spec = child_spec(config)
    encoded = msgspec.json.encode(config) + b"\n"
    if len(encoded) > MAX_CONFIG_BYTES:
        raise ConfigurationError("the worker's configuration is too long: give shorter paths and fewer addresses.")
    read_end, write_end = os.pipe()
    os.write(write_end, encoded)
    os.set_inheritable(read_end, True)
    os.set_inheritable(write_end, True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until `child.main` can answer it
    os.execve(spec.command[0], [*spec.command, str(read_end)], spec.environment)
