"""What this machine has: read once, handed to `resolve` as plain numbers. No torch."""

import os
import platform
from pathlib import Path

import msgspec

_GPU_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl")


class Machine(msgspec.Struct, frozen=True):
    """`memory` is what may still be taken, in bytes: the kernel's estimate or the container's limit, the smaller."""

    cores: int
    memory: int
    architecture: str  # platform.machine(): "x86_64", "aarch64", "arm64"
    system: str  # platform.system(): "Linux", "Darwin"
    has_gpu: bool

    @property
    def has_fbgemm(self) -> bool:
        """torch's fp16 CPU matmul comes with FBGEMM, which exists for x86-64 only."""
        return self.architecture in ("x86_64", "AMD64")


def describe_machine() -> Machine:
    return Machine(
        cores=usable_cores(),
        memory=available_memory(),
        architecture=platform.machine(),
        system=platform.system(),
        has_gpu=any(Path(device).exists() for device in _GPU_DEVICES),
    )


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
