"""OpCost: what an op must move and compute at least, the floor its time is held against."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpCost:
    """`bytes` that must cross the device's memory bus, each once, and operations (a fused one is two)."""

    bytes: int
    flops: int

    def floor_seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """The least time on a device of these rates: the slower of the two."""
        return max(self.bytes / bytes_per_second, self.flops / flops_per_second)
