"""What this machine has: read once, handed to `resolve` as plain numbers. No torch is imported for it."""

import os
import platform
import re
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import msgspec

from .gpus import Gpu, GpuListing, list_gpus


class Machine(msgspec.Struct, frozen=True):
    """`memory` is what may still be taken, in bytes: the kernel's estimate or the container's limit, the smaller."""

    cores: int
    memory: int
    architecture: str  # platform.machine(): "x86_64", "aarch64", "arm64"
    system: str  # platform.system(): "Linux", "Darwin"
    cards: GpuListing = GpuListing()
    torch_cuda: str = ""  # CUDA version that torch was built for: "13.0"; "" for a CPU build, or where torch is absent
    has_triton: bool = False
    missing_for_triton: tuple[str, str] | None = None  # what it needs to build its launcher, and the apt package
    interprets_triton: bool = False  # TRITON_INTERPRET=1: kernels run as Python, for developers

    @property
    def has_fbgemm(self) -> bool:
        """torch's fp16 CPU matmul comes with FBGEMM, which exists for x86-64 only."""
        return self.architecture in ("x86_64", "AMD64")

    def with_gpus(self, gpus: tuple[Gpu, ...]) -> "Machine":
        """As if these cards were all there are."""
        return msgspec.structs.replace(self, cards=msgspec.structs.replace(self.cards, gpus=gpus))


def describe_machine() -> Machine:
    return Machine(
        cores=usable_cores(),
        memory=available_memory(),
        architecture=platform.machine(),
        system=platform.system(),
        cards=list_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")),
        torch_cuda=torch_cuda_version(),
        has_triton=find_spec("triton") is not None,
        missing_for_triton=missing_for_triton(),
        interprets_triton=os.environ.get("TRITON_INTERPRET", "") == "1",
    )


def torch_cuda_version(folder: Path | None = None) -> str:
    """Read from torch's own version file: importing it takes seconds and hundreds of MB."""
    if folder is None:
        spec = find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return ""
        folder = Path(spec.submodule_search_locations[0])
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", _read(folder / "version.py"), re.MULTILINE)
    return found[1] if found else ""


def missing_for_triton(include: Path | None = None) -> tuple[str, str] | None:
    """Triton builds a small C module for the driver when it first runs: what is missing for that, and its package."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler", "gcc"
    if include is None:
        scheme = sysconfig.get_default_scheme()
        # Debian's scheme for local packages has no headers; Triton looks where this looks.
        include = Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))
    if not (include / "Python.h").exists():
        return f"Python's headers ({include}/Python.h)", f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return None


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: its affinity mask, and the container's CPU quota (cgroup v2) rounded down."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return max(1, min(affinity, int(quota) // int(period)))
    return affinity


def available_memory(
    meminfo: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Bytes: the smaller of MemAvailable and what the cgroup (v2, then v1) leaves below its limit."""
    candidates = [_meminfo_available(meminfo)]
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read(cgroup / limit_file), _read(cgroup / usage_file)
        if limit.isdigit() and usage.isdigit():
            candidates.append(max(0, int(limit) - int(usage)))
    return min(candidates)


def _meminfo_available(meminfo: Path) -> int:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # Not Linux: half of the physical memory is the best guess without a dependency.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _read(path: Path) -> str:
    """Content without the final newline; empty where there is no such file (another system, another cgroup version)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
