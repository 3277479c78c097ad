"""Simulate a fleet of GPUs under a workload: Baton's own schedulers, router and admission on a device cost model.

    python scripts/simulate.py --trace TRACE.jsonl --model llama3.1-8b-bf16-tp1-h200 --prefill 1 --decode 1 --rate 8
    python scripts/simulate.py --input-len 1000 --output-len 200 --requests 2000 --rate 20 --prefill 0 --decode 2
    python scripts/simulate.py --trace TRACE.jsonl --steps 4:300,8:300,12:300,4:300 --ttft 500 --tpot 50 --json

Traces are JSON Lines with timestamp (ms), input_length, output_length and, if there are any, hash_ids. The cost models
are sums of kernel times: host time is added by --host-ms and --host-us-per-sequence. The same command gives the same
result.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from baton.core.config import SchedulerConfig
from baton.core.errors import BatonError, ConfigurationError
from baton.core.latency import Distribution
from baton.core.trace import TraceRow, read_trace
from baton.core.tuner_event import TunerEvent
from baton.sim.device import Overheads, TableDevice, device_model, device_models
from baton.sim.handover import LinkSpeed
from baton.sim.report import SimReport, report
from baton.sim.simulation import FleetConfig, Simulation
from baton.sim.workload import LoadStep, SimRequest, gamma_requests, stepped_requests, trace_requests

_TUNED_SHOWN = 10  # the last changes that tuners made


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    load = parser.add_argument_group("workload")
    load.add_argument("--trace", type=Path)
    load.add_argument("--requests", type=int, default=0, help="of the trace, the first so many; 0: all")
    load.add_argument("--rate", type=float, help="requests/s; without it the trace's own times")
    load.add_argument("--steps", help="RATE:SECONDS,RATE:SECONDS,... instead of --rate")
    load.add_argument("--jitter-ms", type=float, default=0.0, help="spread the requests of one tick of the trace")
    load.add_argument("--max-tokens", type=int, help="what clients ask for; default: exactly what they get")
    load.add_argument("--gamma-cv", type=float, default=1.0, help="without a trace: burstiness of equal requests")
    load.add_argument("--input-len", type=int, default=1024)
    load.add_argument("--output-len", type=int, default=128)
    load.add_argument("--seed", type=int, default=0)
    devices = parser.add_argument_group("fleet")
    devices.add_argument("--model", default="llama3.1-8b-bf16-tp1-h200", help=", ".join(device_models()))
    devices.add_argument("--prefill", type=int, default=1)
    devices.add_argument("--decode", type=int, default=1)
    devices.add_argument("--kv-tokens", type=int, help="pool of each worker; default: what the device has room for")
    devices.add_argument("--block-size", type=int, default=16, help="64 simulates faster")
    devices.add_argument("--host-ms", type=float, default=0.5, help="before each step")
    devices.add_argument("--host-us-per-sequence", type=float, default=5.0)
    devices.add_argument("--no-overlap", action="store_true", help="plan a step only when the one before is over")
    limits = parser.add_argument_group("settings")
    limits.add_argument("--prefill-budget", type=int, default=4096, help="tokens of one prefill step")
    limits.add_argument("--decode-budget", type=int, default=2048, help="tokens of one decode step, prompts included")
    limits.add_argument("--chunk", type=int, default=0, help="tokens of one prompt in a step; 0: the budget")
    limits.add_argument("--max-running", type=int, default=256)
    limits.add_argument("--tune", action="store_true", help="let the workers' tuners move the settings above")
    limits.add_argument("--max-queue", type=int, default=256)
    limits.add_argument("--max-queue-delay", type=float, default=60.0)
    shown = parser.add_argument_group("report")
    shown.add_argument("--ttft", type=float, help="limit in ms, for goodput")
    shown.add_argument("--tpot", type=float, help="limit in ms, for goodput")
    shown.add_argument("--window", type=float, default=60.0, help="seconds")
    shown.add_argument("--json", action="store_true")
    return parser.parse_args()


def workload(options: argparse.Namespace) -> list[SimRequest]:
    if options.trace is None:
        if options.rate is None:
            raise ConfigurationError("without --trace, --rate is needed")
        count, lengths = options.requests or 1000, (options.input_len, options.output_len)
        return gamma_requests(count, options.rate, options.gamma_cv, *lengths, seed=options.seed)
    rows: list[TraceRow] = read_trace(options.trace, options.requests or sys.maxsize)
    jitter_s = options.jitter_ms / 1000
    if options.steps is None:
        return trace_requests(rows, options.rate, options.max_tokens, jitter_s, options.seed)
    try:
        steps = [LoadStep(*map(float, step.split(":"))) for step in options.steps.split(",")]
    except (TypeError, ValueError):
        raise ConfigurationError(f"--steps {options.steps}: give RATE:SECONDS,..., for example 4:300,8:300") from None
    return stepped_requests(rows, steps, options.max_tokens, jitter_s, options.seed)


def fleet(options: argparse.Namespace) -> FleetConfig:
    model = device_model(options.model)
    kv_tokens = options.kv_tokens or model.kv_capacity_tokens

    def limits(budget: int) -> SchedulerConfig:
        fixed = SchedulerConfig(budget, options.chunk or budget, options.max_running)
        if not options.tune:
            return fixed
        return msgspec.structs.replace(
            fixed,
            token_budget_range=(128, 8192),
            max_running_range=(1, 256),
            ttft_target_s=options.ttft and options.ttft / 1000,
            tpot_target_s=options.tpot and options.tpot / 1000,
        )

    return FleetConfig(
        num_prefill=options.prefill,
        num_decode=options.decode,
        device=TableDevice(model),
        overheads=Overheads(options.host_ms / 1e3, options.host_us_per_sequence / 1e6, sampling_s=3e-4),
        prefill=limits(options.prefill_budget),
        decode=limits(options.decode_budget),
        num_blocks=kv_tokens // options.block_size,
        block_size=options.block_size,
        link=LinkSpeed(model.kv_bytes_per_token, model.link_bytes_per_s, 1e-4, model.num_layers),
        message_s=2e-4,
        overlaps=not options.no_overlap,
        max_queue=options.max_queue,
        max_queue_delay_s=options.max_queue_delay,
        # As `serve` gives them to both: a gateway with targets refuses who would be late.
        ttft_target_s=options.ttft / 1000 if options.tune and options.ttft else None,
        tpot_target_s=options.tpot / 1000 if options.tune and options.tpot else None,
    )


def show(found: SimReport, num_requests: int, tuned: list[tuple[str, TunerEvent]]) -> None:
    def line(name: str, value: str) -> None:
        print(f"{name:<28}{value:>28}")

    def latency(name: str, values: Distribution | None) -> None:
        if values is not None:
            print(f"{name:<8}{values.mean:>12.1f}{values.median:>12.1f}{values.p90:>12.1f}{values.p99:>12.1f}")

    line("requests", str(num_requests))
    line("completed", str(found.completed))
    for status, count in found.refused.items():
        line(f"refused with {status}", str(count))
    line("requests/s", f"{found.request_throughput:.2f}")
    line("goodput (requests/s)", f"{found.request_goodput:.2f}")
    line("kept the limits", f"{found.attainment:.1%}")
    line("output tokens/s", f"{found.output_throughput:.0f}")
    line("prompt tokens cached", f"{found.cached_share:.1%}")
    line("preemptions", str(found.num_preemptions))
    line("KV sent (GB)", f"{found.kv_gb_sent:.1f}")
    for worker, share in found.utilisation.items():
        line(f"{worker} busy", f"{share:.1%}")
    print(f"\n{'ms':<8}{'mean':>12}{'median':>12}{'p90':>12}{'p99':>12}")
    for name, values in (("TTFT", found.ttft_ms), ("TPOT", found.tpot_ms), ("ITL", found.itl_ms)):
        latency(name, values)
    for worker, event in tuned[-_TUNED_SHOWN:]:
        print(f"{event.at:>8.1f} s  {worker}: {event}")
    if len(found.windows) > 1:
        print(f"\n{'from s':>8}{'arrived':>10}{'refused':>10}{'kept':>10}{'goodput/s':>12}")
        for window in found.windows:
            print(
                f"{window.start_s:>8.0f}{window.arrived:>10}{window.refused:>10}{window.attainment:>10.1%}"
                f"{window.goodput:>12.2f}"
            )


def main() -> None:
    options = parse_arguments()
    try:
        requests = workload(options)
        simulation = Simulation(fleet(options), requests)
        result = simulation.run()
    except BatonError as error:
        sys.exit(f"simulate: {error}")
    targets = {name: limit for name in ("ttft", "tpot") if (limit := getattr(options, name)) is not None}
    found = report(result, targets, options.window)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        show(found, len(requests), result.tuned)
    print(
        f"\n{found.virtual_s:.0f} virtual s in {found.real_s:.1f} s: {found.speed:.0f} x real time, "
        f"{result.num_tokens_generated} tokens",
        file=sys.stderr,
    )
    for fault in simulation.idle_faults():
        sys.exit(f"simulate: something is left over: {fault}")


if __name__ == "__main__":
    main()
