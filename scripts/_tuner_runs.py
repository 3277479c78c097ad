"""One run of prove_tuners.py: workloads and their targets, steps of load, fixed and tuned fleets, what was kept."""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from statistics import median

import msgspec

from baton.core.config import SchedulerConfig
from baton.core.step_cost import StepShape
from baton.core.trace import TraceRow, read_trace
from baton.sim.calibration import Tally, capacity, medians_ms, share_kept, unloaded_records
from baton.sim.device import Overheads, TableDevice, device_model
from baton.sim.handover import LinkSpeed
from baton.sim.record import SimRecord
from baton.sim.simulation import FleetConfig, Simulation
from baton.sim.workbench import SimWorkbench
from baton.sim.workload import LoadStep, SimRequest, stepped_requests

BUDGETS = tuple(128 << n for n in range(7))
CAPS = tuple(1 << n for n in range(9))
LOADS = (0.5, 0.9, 1.2, 0.5)  # of capacity
STEP_S = 300.0
SETTLING_S = 60.0  # of each step, which do not count
SHARE = 0.9
CAPACITY_S = 600.0  # of steady load
NUM_ALONE = 200  # rows of the trace that are served alone
TTFT_TIMES, TPOT_TIMES = 4.0, 2.0  # targets, of the unloaded medians
BLOCK_SIZE = 64
DEFAULT_BUDGETS, DEFAULT_CAP = (4096, 2048), 256  # of a prefill and of a decode worker


@dataclass(frozen=True)
class Trace:
    """`jitter_s`: its clock's tick, over which the requests of one tick are spread."""

    file: str
    jitter_s: float = 0.0


WORKLOADS = {
    "azure-code": Trace("azure2023_code_00-20min.jsonl"),
    "azure-conv": Trace("azure2023_conv_00-20min.jsonl"),
    "mooncake-conv": Trace("mooncake_conversation_00-20min.jsonl", 3.0),
    "servegen-r1": Trace("servegen_r1_1h.jsonl"),
}
HELD_OUT = {"servegen-msmall": Trace("servegen_msmall_1h.jsonl")}


class Conditions(msgspec.Struct, frozen=True):
    """What follows from a workload and a device model, for every fleet. `share_alone` keep both targets unloaded."""

    ttft_ms: float
    tpot_ms: float
    share_alone: float
    capacity: float  # requests/s

    @property
    def limits_ms(self) -> dict[str, float]:
        return {"ttft": self.ttft_ms, "tpot": self.tpot_ms}


class Outcome(msgspec.Struct, frozen=True):
    """`kept` and `arrived` by step of load; what the run used at most of the limits of its settings; tuners' errors."""

    kept: tuple[int, ...]
    arrived: tuple[int, ...]
    most_tokens: int
    most_sequences: int
    errors: tuple[float, ...] = ()  # median |predicted / measured - 1| of later steps: prefill, decode

    @property
    def total(self) -> int:
        return sum(self.kept)


def fleet(
    model_name: str, prefill: SchedulerConfig, decode: SchedulerConfig, conditions: Conditions | None = None
) -> FleetConfig:
    """With conditions, the gateway refuses who cannot be in time; whatever the workers do."""
    model = device_model(model_name)
    return FleetConfig(
        num_prefill=1,
        num_decode=1,
        device=TableDevice(model),
        overheads=Overheads(per_step_s=5e-4, per_sequence_s=5e-6, sampling_s=3e-4),
        prefill=prefill,
        decode=decode,
        num_blocks=model.kv_capacity_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        link=LinkSpeed(model.kv_bytes_per_token, model.link_bytes_per_s, 1e-4, model.num_layers),
        message_s=2e-4,
        ttft_target_s=conditions and conditions.ttft_ms / 1000,
        tpot_target_s=conditions and conditions.tpot_ms / 1000,
    )


def fixed(tokens: int, sequences: int) -> SchedulerConfig:
    return SchedulerConfig(tokens, tokens, sequences)


def defaults() -> Iterator[SchedulerConfig]:
    """Of the prefill and of the decode worker."""
    return (fixed(budget, DEFAULT_CAP) for budget in DEFAULT_BUDGETS)


def tuned(conditions: Conditions) -> Iterator[SchedulerConfig]:
    return (
        msgspec.structs.replace(
            default,
            token_budget_range=(BUDGETS[0], BUDGETS[-1]),
            max_running_range=(CAPS[0], CAPS[-1]),
            ttft_target_s=conditions.ttft_ms / 1000,
            tpot_target_s=conditions.tpot_ms / 1000,
        )
        for default in defaults()
    )


@lru_cache
def trace_rows(data: Path, workload: str) -> list[TraceRow]:
    return read_trace(data / (WORKLOADS | HELD_OUT)[workload].file, sys.maxsize)


def requests_of(data: Path, workload: str, steps: Sequence[LoadStep]) -> list[SimRequest]:
    return stepped_requests(trace_rows(data, workload), steps, jitter_s=(WORKLOADS | HELD_OUT)[workload].jitter_s)


def measure_conditions(data: Path, model: str, workload: str) -> Conditions:
    config, rows = fleet(model, *defaults()), trace_rows(data, workload)
    alone = unloaded_records(config, rows[:: max(len(rows) // NUM_ALONE, 1)])
    ttft, tpot = medians_ms(alone)
    limits = {"ttft": TTFT_TIMES * ttft, "tpot": TPOT_TIMES * tpot}
    share_alone = share_kept(alone, limits)

    def steady(rate: float) -> list[SimRequest]:
        """The trace's requests without its bursts: a Poisson process."""
        requests = requests_of(data, workload, [LoadStep(rate, CAPACITY_S)])
        generator = random.Random("capacity")
        arrivals = accumulate(generator.expovariate(rate) for _ in requests)
        return [replace(request, arrival_s=at) for request, at in zip(requests, arrivals, strict=True)]

    found = capacity(config, steady, limits, SHARE * share_alone)
    return Conditions(limits["ttft"], limits["tpot"], share_alone, found)


def run_steps(
    data: Path, model: str, workload: str, conditions: Conditions, setting: tuple[int, int] | None
) -> Outcome:
    """All steps of load with a fixed setting (tokens, sequences), or None: tuned."""
    steps = [LoadStep(load * conditions.capacity, STEP_S) for load in LOADS]
    requests = requests_of(data, workload, steps)
    spans = [(index * STEP_S + SETTLING_S, (index + 1) * STEP_S) for index in range(len(steps))]
    tally = Tally(requests, spans, conditions.limits_ms)

    def is_decided(records: Sequence[SimRecord], now: float) -> bool:
        tally.update(records, now)
        return tally.is_complete

    limits = tuned(conditions) if setting is None else (fixed(setting[0], DEFAULT_CAP), fixed(*setting))
    simulation = Simulation(fleet(model, *limits, conditions), requests)
    watches = [_Watch(worker.bench) for worker in simulation.workers]
    result = simulation.run(is_decided)
    tally.update(result.records, result.virtual_s)
    return Outcome(
        kept=tuple(tally.kept),
        arrived=tuple(tally.arrived),
        most_tokens=max(watch.most_tokens for watch in watches),
        most_sequences=_most_at_once(result.records, result.virtual_s),
        errors=tuple(watch.error for watch in watches) if setting is None else (),
    )


class _Watch:
    """What one worker's steps are like, and how well they were predicted before they ran."""

    def __init__(self, bench: SimWorkbench):
        self.most_tokens = 0  # of a step with prompts, decodes included
        self._bench = bench
        self._errors: list[float] = []
        bench.observers.append(self._saw)

    def _saw(self, shape: StepShape, seconds: float, ends: float) -> None:
        if shape.num_prompt_tokens:
            self.most_tokens = max(self.most_tokens, shape.num_prompt_tokens + shape.num_decodes)
        if ends > SETTLING_S and self._bench.num_steps % 16 == 0:
            self._errors.append(abs(self._bench.steps.cost.seconds(shape) / seconds - 1))

    @property
    def error(self) -> float:
        return median(self._errors) if self._errors else 0.0


def _most_at_once(records: Sequence[SimRecord], until: float) -> int:
    """Requests between arrival and end at the same time: no fewer than ever ran together."""
    changes = [(record.arrived_s, 1) for record in records]
    changes += [(record.ended_s if record.status else until, -1) for record in records]
    return max(accumulate(change for _, change in sorted(changes, key=lambda at: (at[0], -at[1]))), default=0)
