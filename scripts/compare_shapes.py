"""Disaggregated beside colocated with chunked prefill, at equal devices, under three shapes of targets.

    python scripts/compare_shapes.py --trace azure2023_conv_00-20min.jsonl [--devices 2,4] [--requests 1000]

Targets are multiples of the unloaded medians of the trace on one device. Goodput is the highest rate at which 90 % of
the requests keep both, by bisection; refused ones have missed. Where not even as many would keep both alone on an idle
fleet, because of their long prompts, it is 90 % of those that would. All fleets have tuners with these targets, and
ITL is taken at one rate for all fleets of a shape, 0.9 of the lowest goodput. The output is Markdown.
"""

import argparse
import dataclasses
import functools
import sys
import time
from pathlib import Path

from baton.core.config import SchedulerConfig
from baton.core.errors import BatonError
from baton.core.latency import counted_distribution_ms
from baton.core.queueing import FAIR
from baton.core.trace import TraceRow, read_trace
from baton.sim.calibration import capacity, medians_ms, share_kept, unloaded_records
from baton.sim.device import Overheads, TableDevice, device_model, device_models
from baton.sim.handover import LinkSpeed
from baton.sim.simulation import FleetConfig, Simulation
from baton.sim.workload import SimRequest, trace_requests

SHAPES = {"tight TPOT": (8.0, 1.3), "balanced": (4.0, 2.0), "tight TTFT": (2.5, 4.0)}  # times the medians: TTFT, TPOT
JITTER_S = 1.0  # the trace's clock ticks seldom
NUM_UNLOADED = 60  # requests whose medians are taken
KEPT = 0.9  # of the requests keep both targets


def fleet(model_name: str, num_prefill: int, num_decode: int, is_elastic: bool, block_size: int = 64) -> FleetConfig:
    """Without targets yet."""
    model = device_model(model_name)
    limits = SchedulerConfig(
        token_budget=2048,
        chunk_size=2048,
        max_running=256,
        token_budget_range=(128, 8192),
        max_running_range=(1, 256),
    )
    return FleetConfig(
        num_prefill=num_prefill,
        num_decode=num_decode,
        device=TableDevice(model),
        overheads=Overheads(5e-4, 5e-6, sampling_s=3e-4),
        prefill=limits,
        decode=limits,
        num_blocks=model.kv_capacity_tokens // block_size,
        block_size=block_size,
        link=LinkSpeed(model.kv_bytes_per_token, model.link_bytes_per_s, 1e-4, model.num_layers),
        message_s=2e-4,
        policy=FAIR,
        is_elastic=is_elastic,
        is_calibrated=True,
    )


def with_targets(config: FleetConfig, limits_ms: dict[str, float]) -> FleetConfig:
    ttft_s, tpot_s = limits_ms["ttft"] / 1000, limits_ms["tpot"] / 1000
    limits = SchedulerConfig(
        **{name: getattr(config.prefill, name) for name in config.prefill.__struct_fields__}
        | {"ttft_target_s": ttft_s, "tpot_target_s": tpot_s}
    )
    return dataclasses.replace(config, prefill=limits, decode=limits, ttft_target_s=ttft_s, tpot_target_s=tpot_s)


def fleets(model_name: str, num_devices: int) -> dict[str, FleetConfig]:
    half = num_devices // 2
    return {
        f"{half}P+{half}D": fleet(model_name, half, half, False),
        f"{num_devices} colocated": fleet(model_name, 0, num_devices, False),
        f"{half}P+{half}D elastic": fleet(model_name, half, half, True),
    }


def p99_itl_ms(config: FleetConfig, requests: list[SimRequest]) -> float:
    found = counted_distribution_ms(Simulation(config, requests).run().gaps)
    return found.p99 if found else 0.0


def compare(rows: list[TraceRow], model_name: str, num_devices: int) -> None:
    alone = unloaded_records(fleet(model_name, 1, 1, False), rows)
    ttft_ms, tpot_ms = medians_ms(alone[:NUM_UNLOADED])
    print(f"\n{num_devices} devices; unloaded medians: TTFT {ttft_ms:.1f} ms, TPOT {tpot_ms:.1f} ms\n")
    names = list(fleets(model_name, num_devices))
    print(
        "| targets | TTFT ms | TPOT ms | keep both alone | must keep both |",
        " | ".join(f"{n}: req/s" for n in names),
        "| elastic / better |",
        end="",
    )
    print(" at req/s |", " | ".join(f"{n}: p99 ITL ms" for n in names), "|")
    print("|---" * (7 + 2 * len(names)) + "|")
    for shape, (times_ttft, times_tpot) in SHAPES.items():
        limits_ms = {"ttft": times_ttft * ttft_ms, "tpot": times_tpot * tpot_ms}
        configs = [with_targets(config, limits_ms) for config in fleets(model_name, num_devices).values()]
        possible = share_kept(alone, limits_ms)
        needed = KEPT if possible >= KEPT else KEPT * possible
        requests_at = functools.partial(trace_requests, rows, jitter_s=JITTER_S)
        rates = [capacity(config, requests_at, limits_ms, needed) for config in configs]
        common = 0.9 * min(rates)
        itls = [p99_itl_ms(config, trace_requests(rows, common, jitter_s=JITTER_S)) for config in configs]
        cells = [shape, f"{limits_ms['ttft']:.0f}", f"{limits_ms['tpot']:.1f}", f"{possible:.3f}", f"{needed:.3f}"]
        cells += [f"{rate:.2f}" for rate in rates]
        cells += [f"{rates[2] / max(rates[:2], default=1.0):.2f}", f"{common:.2f}", *(f"{itl:.1f}" for itl in itls)]
        print("|", " | ".join(cells), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000, help="of the trace, the first so many")
    parser.add_argument("--devices", default="2,4", help="even numbers")
    parser.add_argument("--model", default="llama3.1-70b-bf16-tp4-h100", help=", ".join(device_models()))
    options = parser.parse_args()
    began = time.perf_counter()
    try:
        rows = read_trace(options.trace, options.requests)
        for num_devices in options.devices.split(","):
            compare(rows, options.model, int(num_devices))
    except BatonError as error:
        sys.exit(f"compare_shapes: {error}")
    print(f"\n{time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
