"""What the device can do at best, measured: bytes a second, and operations a second of a large matrix product."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.cpu import pack_linear
from .case import Run
from .timing import Timer, time_runs

_BUDGET_S = 1.0


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """`bytes_per_second`: a copy's reads and writes together; on the CPU, whose copies read what they overwrite, a sum
    reads faster, and the faster of the two counts. `flops_per_second`: arithmetic |-> rate, a fused operation is two.
    """

    bytes_per_second: float
    flops_per_second: Mapping[str, float]

    def or_better(self, other: "DeviceLimits") -> "DeviceLimits":
        """The higher of each rate; both have measured the same ones."""
        rates = {name: max(rate, other.flops_per_second[name]) for name, rate in self.flops_per_second.items()}
        return DeviceLimits(max(self.bytes_per_second, other.bytes_per_second), rates)


def measure_limits(timer: Timer, device: torch.device, dtypes: tuple[str, ...], scale: int = 1) -> DeviceLimits:
    """On the CPU `dtypes` are those of weights (activations are float32). `scale` divides the sizes, for tests."""
    bandwidth = _bandwidth(timer, device, (1024 if device.type == "cuda" else 192) * 1024**2 // scale)
    size = (8192 if device.type == "cuda" else 1024) // scale
    rates = {dtype: 2 * size**3 / _seconds(timer, _product(size, dtype, device)) for dtype in dtypes}
    return DeviceLimits(bandwidth, rates)


def _bandwidth(timer: Timer, device: torch.device, num_bytes: int) -> float:
    source, target = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
    copied = 2 * num_bytes / _seconds(timer, lambda: target.copy_(source))
    return copied if device.type == "cuda" else max(copied, num_bytes / _seconds(timer, source.sum))


def _product(size: int, dtype: str, device: torch.device) -> Run:
    weight = torch.randn(size, size, device=device)
    if device.type == "cpu":
        return partial(pack_linear(weight, None, dtype), torch.randn(size, size))
    half: torch.dtype = getattr(torch, dtype)
    return partial(torch.mm, weight.to(half), weight.to(half))


def _seconds(timer: Timer, run: Run) -> float:
    """The best round: a limit is not made slower by what else the machine did."""
    return time_runs(timer, [run], _BUDGET_S).least
