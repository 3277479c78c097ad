"""`baton doctor`: facts about this machine, and for each problem one fix."""

import platform
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

import msgspec

from ..vocab.source import default_cache_dir
from .compute import obstacles
from .gpus import Gpu
from .machine import Machine, describe_machine
from .options import GatewayFlags
from .sizes import format_size
from .topology import ring_size

PACKAGES = ("baton-serve", "torch", "triton", "pyzmq", "tokenizers", "safetensors", "gguf")
OPTIONAL = {"triton": "only GPU kernels need it", "gguf": "only `baton pull` of a .gguf model needs it"}
DEFAULT_MODEL_BYTES = 500 * 1024**2  # download, converted weights and some room between
MIN_MEMORY = 2 * 1024**3


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `fix` is empty when all is well."""

    topic: str
    fact: str
    fix: str = ""


def examine() -> list[Finding]:
    machine = describe_machine()
    return [
        python_finding(sys.version_info[:2]),
        *(package_finding(name) for name in PACKAGES),
        *machine_findings(machine),
        shared_memory_finding(Path("/dev/shm")),
        port_finding(GatewayFlags().host, GatewayFlags().port),
        cache_finding(default_cache_dir()),
    ]


def write_report(findings: list[Finding], out: TextIO) -> int:
    """Print all findings; return 1 when one of them needs a fix."""
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        mark = "!" if finding.fix else " "
        out.write(f"{mark} {finding.topic:<{width}}  {finding.fact}\n")
        if finding.fix:
            out.write(f"  {'':<{width}}  -> {finding.fix}\n")
    problems = sum(bool(finding.fix) for finding in findings)
    out.write("no problems found\n" if not problems else f"{problems} problem(s) found\n")
    return 1 if problems else 0


def python_finding(running: tuple[int, int]) -> Finding:
    fact = f"{running[0]}.{running[1]} ({platform.python_implementation()}, {sys.executable})"
    return Finding("python", fact, "" if running >= (3, 11) else "install Python 3.11 or later")


def package_finding(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        if name in OPTIONAL:
            return Finding(name, f"not installed; {OPTIONAL[name]}")
        return Finding(name, "not installed", f"pip install {name}")


def machine_findings(machine: Machine) -> list[Finding]:
    small = machine.memory < MIN_MEMORY
    matmul = "fp16 weights through FBGEMM" if machine.has_fbgemm else "float32 weights (FBGEMM is for x86-64 only)"
    return [
        Finding("system", f"{machine.system} {machine.architecture}, {machine.cores} usable core(s)"),
        Finding(
            "memory",
            f"{format_size(machine.memory)} available",
            "close something, or raise the container's limit" if small else "",
        ),
        Finding("matmul", matmul),
        *gpu_findings(machine),
    ]


def gpu_findings(machine: Machine) -> list[Finding]:
    """Cards, and whether torch and Triton can use them. On a machine without a card nothing else matters."""
    cards = machine.cards
    if not cards.gpus:
        return [Finding("gpu", f"none: {cards.problem}", cards.fix)]
    facts = {
        "driver": f"NVIDIA {cards.driver}",
        "torch": f"built for CUDA {machine.torch_cuda}",
        "triton": "installed",
        "compiler": "a C compiler and Python's headers, for Triton",
    }
    in_the_way = {obstacle.topic: obstacle for obstacle in obstacles(machine)}
    findings = [Finding("gpu", f"{gpu.text}, sm_{gpu.capability}, {_free(gpu)}") for gpu in cards.gpus]
    for topic, fact in facts.items():
        obstacle = in_the_way.get(topic)
        findings.append(
            Finding(f"gpu {topic}", obstacle.problem if obstacle else fact, obstacle.fix if obstacle else "")
        )
    return findings


def _free(gpu: Gpu) -> str:
    if not gpu.total_bytes:
        return "memory unknown"
    return f"{format_size(gpu.free_bytes)} of {format_size(gpu.total_bytes)} free"


def shared_memory_finding(folder: Path) -> Finding:
    """KV travels through files here; each pair of a prefill and a decode worker has a ring."""
    if not folder.is_dir():
        return Finding("shared memory", f"no {folder}: the temporary directory is used")
    free = shutil.disk_usage(folder).free
    fact = f"{folder} has {format_size(free)} free, a pair of workers needs {format_size(ring_size())}"
    fix = "" if free >= ring_size() else "free some (a container: --shm-size=1g), or use --transport tcp"
    return Finding("shared memory", fact, fix)


def port_finding(host: str, port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Finding("port", f"{port} on {host}: {error.strerror}", "stop what listens there, or use --port 0")
    return Finding("port", f"{port} on {host} is free")


def cache_finding(cache: Path) -> Finding:
    models = [path.name for path in sorted(cache.glob("models/*")) if (path / "config.json").exists()]
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    fact = f"{cache}: {', '.join(models) if models else 'no model yet'}; {format_size(free)} free"
    fix = "" if models or free >= DEFAULT_MODEL_BYTES else "free some space, or set XDG_CACHE_HOME to another disk"
    return Finding("model cache", fact, fix)
