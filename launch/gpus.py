"""Which NVIDIA cards are here: asked of nvidia-smi, because a launcher that imported torch would hold a CUDA context.

A card's index is its place among those that CUDA_VISIBLE_DEVICES leaves visible, as every CUDA program counts; its UUID
is what a worker gets. Numbers in CUDA_VISIBLE_DEVICES are taken in the order of nvidia-smi: on a machine with cards of
several kinds CUDA itself may count otherwise (CUDA_DEVICE_ORDER), UUIDs are always right.
"""

import os
import shutil
import subprocess
from pathlib import Path

import msgspec

_QUERY = "index,uuid,name,compute_cap,memory.total,memory.free,driver_version"
_TIMEOUT_S = 30.0  # without a persistence daemon the driver wakes each card first
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
_REPAIR = "repair the NVIDIA driver until `nvidia-smi` lists the cards"
_NO_CARDS = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that mean none


class Gpu(msgspec.Struct, frozen=True):
    """One card, or one MIG instance of a card. Sizes are in bytes; what is not known is 0."""

    index: int
    uuid: str  # "GPU-..." or "MIG-..."
    name: str
    capability: int = 0  # 90 for compute capability 9.0
    total_bytes: int = 0
    free_bytes: int = 0

    @property
    def text(self) -> str:
        """`cuda:0 (NVIDIA H200)`."""
        return f"cuda:{self.index} ({self.name})"


class GpuListing(msgspec.Struct, frozen=True):
    """The visible cards. `problem`: why there is none; `fix`: what to do about it, "" where nothing hints at a card."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""  # version of the NVIDIA driver
    problem: str = ""
    fix: str = ""


def list_gpus(visible: str | None = None) -> GpuListing:
    """Ask nvidia-smi. `visible`: CUDA_VISIBLE_DEVICES. A machine without a driver is answered at once."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return _no_command(any(Path(file).exists() for file in _DEVICE_FILES))
    try:
        answer = subprocess.run(
            [command, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=os.environ | {"LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return GpuListing(
            problem=f"nvidia-smi did not answer within {_TIMEOUT_S:.0f} s", fix="see `dmesg`: a card hangs"
        )
    except OSError as error:
        return GpuListing(problem=f"nvidia-smi cannot be run ({error.strerror})", fix=_REPAIR)
    if answer.returncode != 0:
        words = (answer.stdout.strip() or answer.stderr.strip() or f"exit code {answer.returncode}").splitlines()[0]
        return GpuListing(problem=f"nvidia-smi says {words[:200]!r}", fix=_REPAIR)
    return listing(answer.stdout, visible)


def listing(text: str, visible: str | None) -> GpuListing:
    """What nvidia-smi's answer and CUDA_VISIBLE_DEVICES come to. Pure."""
    gpus, driver = parse_gpus(text)
    if not gpus:
        return GpuListing((), driver, "the NVIDIA driver finds no card", "plug one in, or give it to this container")
    left = visible_gpus(gpus, visible)
    if not left:
        return GpuListing((), driver, f"CUDA_VISIBLE_DEVICES={visible!r} hides every card", "unset it")
    return GpuListing(left, driver)


def parse_gpus(text: str) -> tuple[tuple[Gpu, ...], str]:
    """Lines of `index, uuid, name, capability, total MiB, free MiB, driver` -> (cards, driver version)."""
    gpus, driver = [], ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_QUERY.split(",")) or not cells[0].isdigit():
            continue  # a warning of nvidia-smi between the rows
        index, uuid, name, capability, total, free, driver = cells
        digits = capability.replace(".", "")
        gpus.append(
            Gpu(int(index), uuid, name, int(digits) if digits.isdigit() else 0, _mebibytes(total), _mebibytes(free))
        )
    return tuple(gpus), driver


def visible_gpus(gpus: tuple[Gpu, ...], variable: str | None) -> tuple[Gpu, ...]:
    """The cards that CUDA_VISIBLE_DEVICES leaves, in its order, counted anew from 0. None: it is not set.

    As in CUDA, names from the first unknown one on count for nothing.
    """
    if variable is None:
        return gpus
    chosen: list[Gpu] = []
    for word in () if variable.strip() in _NO_CARDS else variable.split(","):
        gpu = find_gpu(gpus, word.strip())
        if gpu is None:
            break
        if gpu.uuid not in [other.uuid for other in chosen]:
            chosen.append(msgspec.structs.replace(gpu, index=len(chosen)))
    return tuple(chosen)


def find_gpu(gpus: tuple[Gpu, ...], word: str) -> Gpu | None:
    """The card with that index, that UUID or that unique beginning of one; a MIG instance is taken at its word."""
    if word.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(word)), None)
    if word.startswith("MIG-"):  # nvidia-smi's list of cards does not show them
        return next((gpu for gpu in gpus if gpu.uuid == word), Gpu(len(gpus), word, "MIG instance"))
    if not word.startswith("GPU-"):
        return None
    matching = [gpu for gpu in gpus if gpu.uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else None


def _mebibytes(cell: str) -> int:
    """Bytes; 0 where nvidia-smi has no number (`[N/A]` on chips that share the system's memory)."""
    return int(cell) * 1024**2 if cell.isdigit() else 0


def _no_command(has_device_file: bool) -> GpuListing:
    if has_device_file:
        fix = "install the driver's utilities (a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        return GpuListing(problem="there is an NVIDIA card, but no nvidia-smi to ask", fix=fix)
    return GpuListing(problem="no NVIDIA driver is installed here (there is no nvidia-smi)")
