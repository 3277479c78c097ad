"""Builders of the launch tests: options, facts, configs and fake children with plain values."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.core.config import EngineConfig, GatewayConfig, NetworkConfig, SchedulerConfig, TransferConfig, WorkerConfig
from baton.core.messages import Role
from baton.launch.child_process import ChildSpec
from baton.launch.compute import resolve_compute
from baton.launch.gpus import Gpu, GpuListing
from baton.launch.machine import Machine
from baton.launch.model_facts import ModelFacts
from baton.launch.options import EngineOptions
from baton.launch.resolve import ResolvedEngine, resolve_engine

GIB = 1024**3
BOUND_S = 20.0  # of every wait; generous, the machine may be busy

MACHINE = Machine(cores=2, memory=8 * GIB, architecture="x86_64", system="Linux")
SMOLLM2 = ModelFacts(
    name="SmolLM2-135M-Instruct",
    folder="/models/smollm2",
    note="from Q4_1",
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    num_parameters=134_515_008,
    files_digest="f00d",
)
AUTO = EngineOptions(
    device="auto",
    dtype="auto",
    block_size=16,
    kv_memory=None,
    threads=None,
    context_length=None,
    max_running=None,
    token_budget=None,
    transport="auto",
)


def cards(count: int, **fields: object) -> tuple[Gpu, ...]:
    """H200s: cuda:0, cuda:1, ..., with nothing on them."""
    usual = {"name": "NVIDIA H200", "capability": 90, "total_bytes": 140 * GIB, "free_bytes": 139 * GIB}
    return tuple(Gpu(index=i, uuid=f"GPU-{i}{i}{i}{i}-aaaa", **{**usual, **fields}) for i in range(count))


def gpu_machine(count: int = 1, **fields: object) -> Machine:
    """A machine on which nothing keeps workers from `count` cards."""
    usual = {
        "cards": GpuListing(cards(count), "580.65.06"),
        "torch_cuda": "13.0",
        "has_triton": True,
    }
    return msgspec.structs.replace(MACHINE, **{**usual, **fields})


def resolve(options: EngineOptions, machine: Machine, model: ModelFacts, *counts: int) -> ResolvedEngine:
    return resolve_engine(options, resolve_compute(options, machine), machine, model, *counts)


def worker_config(name: str, threads: int = 1) -> WorkerConfig:
    return WorkerConfig(
        worker_id=name,
        roles=(Role.DECODE,),
        served_model="tiny",
        model_digest="d",
        context_length=1024,
        engine=EngineConfig("/models/tiny", "cpu", "torch", "float32", 16, 64, threads),
        prefill=SchedulerConfig(256, 256, 64),
        decode=SchedulerConfig(256, 256, 64),
        transfer=TransferConfig(),
        network=NetworkConfig("", "127.0.0.1", ("tcp://127.0.0.1:1",), "/keys"),
    )


def gateway_config() -> GatewayConfig:
    return GatewayConfig("gateway-0", "tiny", "/models/tiny", "d", "127.0.0.1", 0, ("ipc:///run/x",), "/keys", 1, 1)


def fake_specs(record: Path, behaviours: list[str]) -> list[ChildSpec]:
    """One fake child per behaviour; those that begin with "gateway" get a gateway's config."""
    script = str(Path(__file__).with_name("fake_child.py"))
    specs = []
    for index, behaviour in enumerate(behaviours):
        config = gateway_config() if behaviour.startswith("gateway") else worker_config(f"worker-{index}", index + 1)
        name = "gateway" if behaviour.startswith("gateway") else f"worker-{index}"
        specs.append(ChildSpec(name, config, (sys.executable, "-P", script, behaviour, str(record))))
    return specs


def lines(record: Path) -> list[str]:
    return record.read_text().splitlines() if record.exists() else []


def count(record: Path, word: str) -> int:
    return sum(word in line for line in lines(record))


def started_pids(record: Path) -> list[int]:
    return [int(line.split()[2]) for line in lines(record) if " started " in line]


def is_running(pid: int) -> bool:
    """False for a zombie too: it has ended, whoever should reap it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


async def until(condition: Callable[[], bool], bound_s: float = BOUND_S) -> None:
    async with asyncio.timeout(bound_s):
        while not condition():
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], bool], bound_s: float = BOUND_S) -> None:
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        os.sched_yield()
        time.sleep(0.01)  # a poll of a condition with a bound
