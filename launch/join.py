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
from .machine import describe_machine
from .network import address_towards
from .options import (
    LOG_LEVELS,
    CommonFlags,
    EngineFlags,
    HostPort,
    parse_engine_options,
    parse_host_port,
    require_choice,
)
from .resolve import resolve_engine
from .serve import find_model, write_line
from .topology import worker_config


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
    facts = find_model(model)
    machine = describe_machine()
    # Over loopback the server's own workers compute on this machine already: half of the cores are theirs.
    threads_taken = machine.cores // 2 if gateways[0].is_loopback else 0
    resolved = resolve_engine(parse_engine_options(engine), machine, facts, 1, threads_taken)
    for line in resolved.explanation:
        write_line(line)
    network = NetworkConfig(
        run_dir="",
        listen_host=address_towards(gateways[0]),
        join=tuple(f"tcp://{gateway.text}" for gateway in gateways),
        key_file=str(key_file.absolute()),
    )
    worker_id = f"{role}-{secrets.token_hex(3)}"
    log_level = "debug" if common.debug else common.log_level
    return worker_config(worker_id, role, facts.name, facts, resolved, network, log_level)


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
