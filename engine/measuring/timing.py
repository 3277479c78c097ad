"""Timers: seconds a run, on the CPU by its clock, on a GPU by events around a graph, free of launch overhead."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .case import Run

MIN_ROUNDS = 5
_MAX_ROUNDS = 50
_MAX_LAUNCHES = 512  # in one graph


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run over several rounds."""

    median: float
    least: float
    most: float
    num_rounds: int

    @property
    def spread(self) -> float:
        """Slowest less fastest round, as a part of the median."""
        return (self.most - self.least) / self.median


class Timer(Protocol):
    """`cold_bytes`: operands of so many bytes together do not fit the caches."""

    cold_bytes: int

    def prepare(self, runs: Sequence[Run]) -> Callable[[], float]:
        """Warm up, and return what does all of `runs` once and says how many seconds one took on average."""


class HostTimer:
    """Of the processor, whose calls return when the work is done. A round is some of the runs, each in its turn."""

    def __init__(self, cold_bytes: int = 128 * 1024**2, round_s: float = 0.01):
        self.cold_bytes = cold_bytes
        self._round_s = round_s

    def prepare(self, runs: Sequence[Run]) -> Callable[[], float]:
        for run in runs:  # pages are touched, products are packed
            run()
        start = time.perf_counter()
        runs[0]()
        count = max(1, round(self._round_s / max(time.perf_counter() - start, 1e-7)))
        turns = itertools.cycle(runs)

        def measure() -> float:
            start = time.perf_counter()
            for run in itertools.islice(turns, count):
                run()
            return (time.perf_counter() - start) / count

        return measure


class CudaTimer:
    """Of a GPU. The runs are captured as one graph, so what is measured is the device's time between neighbouring
    launches, as in a decode graph; small ops would otherwise show how fast the host calls."""

    def __init__(self, device: torch.device, round_s: float = 0.004):
        self.cold_bytes = 4 * int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._round_s = round_s

    def prepare(self, runs: Sequence[Run]) -> Callable[[], float]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for run in runs:  # compiles
                run()
            estimate = _elapsed(lambda: [run() for run in runs])
            repeats = round(self._round_s / max(estimate, 1e-7))
            repeats = max(1, min(repeats, _MAX_LAUNCHES // len(runs)))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                for run in runs:
                    run()
        graph.replay()
        return lambda: _elapsed(graph.replay) / (repeats * len(runs))


def _elapsed(work: Run) -> float:
    """Seconds the device spends on `work`."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def timer_for(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


def time_runs(timer: Timer, runs: Sequence[Run], budget_s: float) -> Timing:
    """At least MIN_ROUNDS rounds, more while `budget_s` lasts."""
    measure = timer.prepare(runs)
    started = time.perf_counter()
    seconds: list[float] = []
    while len(seconds) < MIN_ROUNDS or (len(seconds) < _MAX_ROUNDS and time.perf_counter() - started < budget_s):
        seconds.append(measure())
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
