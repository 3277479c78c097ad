"""Baton's schedulers beside DistServe's, on DistServe's own terms: coefficients, lengths, arrivals and goodput rule.

    python scripts/compare_distserve.py [--rows 12] [--token-budget 2048] [--max-running 256]

OPT-13B on two A100. A rate passes when the P90 of TTFT and the P90 of TPOT each keep their limit over 500 requests;
goodput is the highest rate that passes, by bisection. DistServe's figures are those of its simulator for one prefill
and one decode instance and for two colocated ones. Baton runs 1 prefill + 1 decode worker and 2 colocated workers; KV
travels in no time and messages too, as there.
"""

import argparse
import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from baton.core.config import SchedulerConfig
from baton.core.latency import percentile
from baton.sim.device import OptDevice, Overheads
from baton.sim.handover import LinkSpeed
from baton.sim.simulation import FleetConfig, Simulation
from baton.sim.workload import timed_requests

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "distserve"
MAX_RATE = 20.0
PRECISION = 0.02  # requests/s
POOL_TOKENS = 66_144  # what its simulator allows in one batch
BLOCK_SIZE = 16


def opt_device(kernels: str = "distserve") -> OptDevice:
    """Its coefficients for OPT-13B on one A100-80G."""
    data = msgspec.json.decode((DATA / "opt13b_a100.json").read_bytes())
    found = data[kernels]
    return OptDevice(found["prefill"], found["decoding_smallbs"], found["decoding_largebs"])


def unit_arrivals_ms() -> list[float]:
    """Its arrivals at one request a second."""
    found: list[float] = msgspec.json.decode((DATA / "arrivals_seed0.json").read_bytes())["unit_ms"]
    return found


def goodput(passes: Callable[[float], bool]) -> float:
    """Its bisection: the highest rate known to pass."""
    low, high = 0.0, MAX_RATE
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def p90_keep(ttfts_ms: Sequence[float], tpots_ms: Sequence[float], limits_ms: tuple[float, float]) -> bool:
    """Its rule: each P90 by itself."""
    return percentile(sorted(ttfts_ms), 90) < limits_ms[0] and percentile(sorted(tpots_ms), 90) < limits_ms[1]


def fleet(num_prefill: int, num_decode: int, token_budget: int, max_running: int) -> FleetConfig:
    limits = SchedulerConfig(token_budget, token_budget, max_running, max_waiting=100_000)
    return FleetConfig(
        num_prefill=num_prefill,
        num_decode=num_decode,
        device=opt_device(),
        overheads=Overheads(),
        prefill=limits,
        decode=limits,
        num_blocks=POOL_TOKENS // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        link=LinkSpeed(1, 1e18, 0.0, 1),
        overlaps=False,
        max_queue=100_000,
        max_queue_delay_s=float("inf"),
    )


def baton_goodput(config: FleetConfig, prompt: int, output: int, limits_ms: tuple[float, float]) -> float:
    arrivals_ms = unit_arrivals_ms()

    def passes(rate: float) -> bool:
        # its first token comes from prefill and is not an output
        requests = timed_requests([at / rate / 1000 for at in arrivals_ms], prompt, output + 1)
        records = Simulation(config, requests).run().records
        assert all(record.status == 200 for record in records)
        ttfts = [record.ttft_s * 1000 for record in records]
        return p90_keep(ttfts, [(record.tpot_s or 0) * 1000 for record in records], limits_ms)

    return goodput(passes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--max-running", type=int, default=256)
    options = parser.parse_args()
    with (DATA / "oracle_goodput.csv").open() as file:
        known = {tuple(row.values())[:5]: float(row["goodput_rps_total"]) for row in csv.DictReader(file)}
    rows = list(dict.fromkeys(key[1:] for key in known))[: options.rows]
    print("requests/s       TTFT   TPOT | DistServe      | Baton          | best Baton /")
    print("prompt output     ms     ms  | 1P+1D  2 coloc | 1P+1D  2 coloc | best DistServe")
    began = time.perf_counter()
    for row in rows:
        prompt, output, *limits = (int(value) for value in row)
        theirs = [known["disagg_1p1d", *row], known["coloc_2x_samecost", *row]]
        fleets = [fleet(p, d, options.token_budget, options.max_running) for p, d in ((1, 1), (0, 2))]
        ours = [baton_goodput(config, prompt, output, (limits[0], limits[1])) for config in fleets]
        print(
            f"{prompt:6} {output:6} {limits[0]:6} {limits[1]:6}  | {theirs[0]:6.2f} {theirs[1]:6.2f}  | {ours[0]:6.2f} "
            f"{ours[1]:6.2f}  |  1P+1D {ours[0] / max(theirs):4.2f}   best {max(ours) / max(theirs):4.2f}",
            flush=True,
        )
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
