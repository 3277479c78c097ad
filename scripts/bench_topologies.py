"""Compare one prefill + one decode worker with a colocated one, alternating, load generator included.

    python scripts/bench_topologies.py [--rounds 5] [--concurrency 8] [--input-len 256] [--output-len 64]

Each round starts each topology afresh (empty cache), warms it up, and runs the same closed loop of random prompts. A
noisy machine hits both alike; the last line gives the ratios of the medians.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

from _helpers import load_module

from baton.bench.metrics import Metrics
from baton.bench.options import BenchConfig, LoadOptions, WorkloadOptions
from baton.bench.run import run

TOPOLOGIES = {"1P1D": ("--prefill", "1"), "colocated": ("--prefill", "0")}
serving = load_module("tests/serving.py")


def measure(flags: tuple[str, ...], arguments: argparse.Namespace, seed: int, folder: Path) -> Metrics:
    with serving.serve(folder, arguments.model, *flags) as server:
        config = BenchConfig(
            url=server.url,
            workload=WorkloadOptions(
                num_requests=arguments.num_requests,
                input_len=arguments.input_len,
                output_len=arguments.output_len,
                seed=seed,
            ),
            load=LoadOptions(concurrency=arguments.concurrency, warmup=2),
        )
        return asyncio.run(run(config)).metrics


def row(name: str, metrics: Metrics) -> str:
    assert metrics.failed == 0
    assert metrics.ttft_ms is not None
    assert metrics.tpot_ms is not None
    assert metrics.itl_ms is not None
    return (
        f"| {name} | {metrics.total_token_throughput:.1f} | {metrics.output_throughput:.1f} "
        f"| {metrics.ttft_ms.median:.0f} | {metrics.ttft_ms.p99:.0f} | {metrics.tpot_ms.median:.1f} "
        f"| {metrics.itl_ms.median:.1f} | {metrics.itl_ms.p99:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    arguments = parser.parse_args()
    results: dict[str, list[Metrics]] = {name: [] for name in TOPOLOGIES}
    print("| run | total tok/s | output tok/s | TTFT med | TTFT p99 | TPOT med | ITL med | ITL p99 |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(arguments.rounds):
            for name, flags in TOPOLOGIES.items():
                metrics = measure(flags, arguments, round_number, Path(folder))
                results[name].append(metrics)
                print(row(f"{name} {round_number + 1}", metrics), flush=True)

    def median(name: str, figure: str) -> float:
        values = [m.itl_ms.p99 if figure == "itl" else m.total_token_throughput for m in results[name] if m.itl_ms]
        return statistics.median(values)

    throughput = median("1P1D", "total") / median("colocated", "total")
    itl = median("1P1D", "itl") / median("colocated", "itl")
    print(f"\nmedian of 1P1D over median of colocated: total throughput {throughput:.3f}, p99 ITL {itl:.3f}")


if __name__ == "__main__":
    main()
