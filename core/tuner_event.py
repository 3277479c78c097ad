"""TunerEvent: a worker changed one of its settings by itself, and why, in words. It travels to the gateways."""

import msgspec


class TunerEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`at` is the worker's monotonic time in seconds. `str()` is the line for people."""

    at: float
    what: str  # the setting, as people call it: "cap", "token budget"
    old: int
    new: int
    reason: str

    def __str__(self) -> str:
        return f"{self.what} {self.old} -> {self.new}: {self.reason}"
