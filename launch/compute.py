"""What computes: device, kernels and dtype, from what was asked for and what is here. Pure.

Combinations, and why the others are refused:

    device  kernels         dtypes                            KV cache
    cpu     torch           float16 (FBGEMM), float32         float32, as the activations
    cpu     triton          float32, float16, int8            as the activations; only under TRITON_INTERPRET=1
    cuda    triton          bfloat16, float16, float32, int8  as the activations (engine/dtypes.py)
"""

from collections.abc import Sequence

import msgspec

from ..core.errors import ConfigurationError
from ..engine.dtypes import activation_dtype
from .gpus import Gpu
from .machine import Machine
from .options import EngineOptions
from .placement import Placement

BFLOAT16_CAPABILITY = 80
_MIN_DRIVERS = {11: 450, 12: 525, 13: 580}  # CUDA version torch was built for |-> NVIDIA driver it runs on
_HOST_TRANSPORTS = ("gloo",)
_DEVICE_TRANSPORTS = ("nccl", "cuda_ipc", "pinned_memory")
_CPU_REFUSALS = {
    "bfloat16": "CPUs without bfloat16 units compute it slower than float32",
    "int8": "torch's int8 matmuls are slower than float16 ones on the CPU",
}


class Compute(msgspec.Struct, frozen=True):
    """`notes`: lines for the user, when something here is not what it could be."""

    device: str
    kernels: str
    dtype: str  # of the weights
    kv_dtype: str  # of the activations, and so of keys and values
    notes: tuple[str, ...] = ()


def resolve_compute(options: EngineOptions, machine: Machine) -> Compute:
    """Raises ConfigurationError naming the flag that cannot be, why, and what can."""
    device, notes = resolve_device(options.device, machine)
    kernels = _resolve_kernels(options.kernels, device, machine)
    if options.deterministic and kernels != "triton":
        raise ConfigurationError(
            f"--deterministic needs Baton's own kernels (triton), and --device {device} computes with torch's. "
            "Leave it out: on the CPU the same requests give the same tokens, up to rounding of sums."
        )
    dtype = resolve_dtype(options.dtype, device, kernels, machine)
    _require_transport(options.transport, device)
    return Compute(device, kernels, dtype, activation_dtype(device, kernels, dtype), notes)


def resolve_device(asked: str, machine: Machine) -> tuple[str, tuple[str, ...]]:
    """`cpu` or `cuda`, and what to tell the user about it."""
    found = obstacles(machine)
    if asked == "cuda" and found:
        raise ConfigurationError(f"--device cuda: {found[0].text}. Or compute on the CPU: --device cpu.")
    if asked == "auto" and found and machine.cards.gpus:
        name = machine.cards.gpus[0].name
        return "cpu", (f"warning: computing on the CPU although there is a card ({name}): {found[0].text}",)
    if asked == "auto":
        asked = "cpu" if found else "cuda"
    return asked, ()


class Obstacle(msgspec.Struct, frozen=True):
    """Why no worker can use a card here, and what to do about it ("" where nothing hints at a card)."""

    topic: str
    problem: str
    fix: str

    @property
    def text(self) -> str:
        return f"{self.problem}: {self.fix}" if self.fix else self.problem


def obstacles(machine: Machine) -> list[Obstacle]:
    """All that keeps workers from the cards of this machine, or would if it had one; none: they can use them."""
    cards, found = machine.cards, []
    if not cards.gpus:
        found.append(Obstacle("gpu", cards.problem or "there is no card", cards.fix))
    if not machine.torch_cuda:
        fix = "install one for CUDA (pip install --force-reinstall torch)"
        found.append(Obstacle("torch", "the torch installed here is a CPU build", fix))
    needed = _MIN_DRIVERS.get(_major(machine.torch_cuda), 0)
    if 0 < _major(cards.driver) < needed:
        problem = f"the NVIDIA driver {cards.driver} is too old for torch's CUDA {machine.torch_cuda}"
        found.append(Obstacle("driver", problem, f"install driver {needed} or later, or a torch for an older CUDA"))
    if not machine.has_triton:
        found.append(Obstacle("triton", "triton is not installed", "pip install triton"))
    if machine.missing_for_triton:
        missing, package = machine.missing_for_triton
        found.append(Obstacle("compiler", f"Triton needs {missing}", f"apt install {package}"))
    return found


def resolve_dtype(asked: str, device: str, kernels: str, machine: Machine) -> str:
    """The weights' dtype for --dtype `asked`. Raises ConfigurationError for what this device cannot compute."""
    if device == "cuda":
        return _cuda_dtype(asked, machine.cards.gpus)
    if asked == "auto":
        return "float16" if machine.has_fbgemm and kernels == "torch" else "float32"
    if kernels == "triton":  # interpreted; what it has no arithmetic for, activation_dtype refuses
        return asked
    if asked in _CPU_REFUSALS:
        raise ConfigurationError(
            f"--dtype {asked} is for --device cuda: {_CPU_REFUSALS[asked]}. Use float16 or float32."
        )
    if asked == "float16" and not machine.has_fbgemm:
        raise ConfigurationError(
            f"--dtype float16 needs FBGEMM, which torch has for x86-64 only; this machine is {machine.architecture}. "
            "Use --dtype float32."
        )
    return asked


def resolve_gateway_dtype(asked: str, machine: Machine) -> str:
    """Of the workers that will join a gateway: what one on this machine would choose, or whatever was asked for.

    A gateway computes nothing: the machine it runs on refuses no dtype.
    """
    if asked != "auto":
        return asked
    device, _ = resolve_device("auto", machine)
    return resolve_dtype("auto", device, "triton" if device == "cuda" else "torch", machine)


def require_nccl_pairs(transport: str, placement: Placement) -> None:
    """NCCL refuses a group whose two ranks have one card. Raises ConfigurationError."""
    decode = {slot.gpu.uuid for slot in placement.decode}
    both = [slot.gpu for slot in placement.prefill if slot.gpu.uuid in decode]
    if transport == "nccl" and both:
        raise ConfigurationError(
            f"--transport nccl: a prefill and a decode worker share {both[0].text}, and NCCL needs a card for each. "
            "Place them apart with --prefill-devices and --decode-devices, or use --transport auto."
        )


def _resolve_kernels(asked: str, device: str, machine: Machine) -> str:
    if asked == "auto":
        return "triton" if device == "cuda" else "torch"
    if device == "cuda" and asked == "torch":
        raise ConfigurationError("--kernels torch is the CPU path. Use --kernels triton, or --device cpu.")
    if device == "cpu" and asked == "triton":
        if not machine.has_triton:
            raise ConfigurationError("--kernels triton: triton is not installed. Use --kernels torch.")
        if not machine.interprets_triton:
            raise ConfigurationError(
                "--kernels triton: Triton's kernels need a GPU. Use --kernels torch (developers: set "
                "TRITON_INTERPRET=1 to interpret them, about a thousand times slower)."
            )
    return asked


def _cuda_dtype(asked: str, gpus: Sequence[Gpu]) -> str:
    old = [gpu for gpu in gpus if 0 < gpu.capability < BFLOAT16_CAPABILITY]
    if asked == "auto":
        return "float16" if old else "bfloat16"
    if old and asked in ("bfloat16", "int8"):
        raise ConfigurationError(
            f"--dtype {asked} computes in bfloat16, which {old[0].text} (sm_{old[0].capability}) has no units for. "
            "Use --dtype float16."
        )
    return asked


def _require_transport(asked: str, device: str) -> None:
    if device == "cuda" and asked in _HOST_TRANSPORTS:
        raise ConfigurationError(
            f"--transport {asked} moves the CPU's memory. Between cards use nccl, or auto, which finds the best."
        )
    if device == "cpu" and asked in _DEVICE_TRANSPORTS:
        raise ConfigurationError(
            f"--transport {asked} moves the memory of cards, and the workers run on the CPU. Use auto, shared_memory, "
            "tcp or gloo."
        )


def _major(version: str) -> int:
    """0 when it is not known."""
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0
