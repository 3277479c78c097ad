"""Baton's schedulers beside DistServe's, on DistServe's own terms: coefficients, lengths, arrivals and goodput rule.

    python scripts/compare_distserve.py [--rows 1,3,5] [--block-size 16]

OPT-13B on two A100. A rate passes when the P90 of TTFT and the P90 of TPOT each keep their limit over 500 requests;
goodput is the highest rate that passes, by bisection. DistServe's figures are those of its simulator for one prefill
and one decode instance and for two colocated ones. Baton is given the row's limits as targets and runs

    elastic   serve --prefill 1 --decode 1 --elastic, as one would run it: prompts go where their first token is
              predicted soonest, roles follow the load, and who cannot be in time is refused
    1P+1D     the same without --elastic
    2 coloc   serve --prefill 0 --decode 2

A refused request counts as one that missed both limits. KV travels in no time and messages too, as there. Its
simulator is told what steps cost; Baton's workers learn it from a few requests that come before and do not count.
"""

import argparse
import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from baton.core.config import SchedulerConfig
from baton.core.latency import percentile
from baton.core.queueing import FAIR
from baton.sim.device import OptDevice, Overheads
from baton.sim.handover import LinkSpeed
from baton.sim.record import SimRecord
from baton.sim.simulation import FleetConfig, Simulation
from baton.sim.workload import timed_requests

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "distserve"
MAX_RATE = 20.0
PRECISION = 0.02  # requests/s
POOL_TOKENS = 66_144  # what its simulator allows in one batch
WARM_UP_S = [at / 3 for at in range(60)]  # arrivals before the load
LOAD_BEGINS_S = 30.0
TOLERATED = 0.1  # of the requests may miss a limit
FLEETS = {"elastic": (1, 1, True), "1P+1D": (1, 1, False), "2 coloc": (0, 2, False)}


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


def fleet(name: str, limits_ms: tuple[float, float], block_size: int) -> FleetConfig:
    """Defaults of `baton serve` with targets, on cards."""
    num_prefill, num_decode, is_elastic = FLEETS[name]
    ttft_s, tpot_s = (limit / 1000 for limit in limits_ms)
    limits = SchedulerConfig(
        token_budget=2048,
        chunk_size=2048,
        max_running=256,
        max_waiting=100_000,
        token_budget_range=(128, 8192),
        max_running_range=(1, 256),
        ttft_target_s=ttft_s,
        tpot_target_s=tpot_s,
    )
    return FleetConfig(
        num_prefill=num_prefill,
        num_decode=num_decode,
        device=opt_device(),
        overheads=Overheads(),
        prefill=limits,
        decode=limits,
        num_blocks=POOL_TOKENS // block_size,
        block_size=block_size,
        link=LinkSpeed(1, 1e18, 0.0, 1),
        overlaps=False,
        policy=FAIR,
        ttft_target_s=ttft_s,
        tpot_target_s=tpot_s,
        is_elastic=is_elastic,
        is_calibrated=True,
    )


def baton_goodput(config: FleetConfig, prompt: int, output: int, limits_ms: tuple[float, float]) -> float:
    arrivals_ms = unit_arrivals_ms()
    num_before = len(WARM_UP_S)

    def passes(rate: float) -> bool:
        # its first token comes from prefill and is not an output
        arrivals_s = WARM_UP_S + [LOAD_BEGINS_S + at / rate / 1000 for at in arrivals_ms]
        requests = timed_requests(arrivals_s, prompt, output + 1)
        most = TOLERATED * len(arrivals_ms) + 1

        def has_failed(records: Sequence[SimRecord], now: float) -> bool:
            counted = records[num_before:]
            late, slow = (sum(value >= limit for value in values) for values, limit in measured(counted, now))
            return max(late, slow) > most

        def measured(records: Sequence[SimRecord], now: float) -> list[tuple[list[float], float]]:
            return list(zip((ttfts_ms(records, now), tpots_ms(records)), limits_ms, strict=True))

        records = Simulation(config, requests).run(has_failed).records[num_before:]
        is_over = len(records) == len(arrivals_ms) and all(record.status for record in records)
        return is_over and p90_keep(ttfts_ms(records, 0.0), tpots_ms(records), limits_ms)

    return goodput(passes)


def ttfts_ms(records: Sequence[SimRecord], now: float) -> list[float]:
    """Of those that have no first token yet: so far."""
    return [
        float("inf")
        if record.status not in (0, 200)
        else ((record.first_token_s if record.output_tokens else now) - record.arrived_s) * 1000
        for record in records
    ]


def tpots_ms(records: Sequence[SimRecord]) -> list[float]:
    """Of those that have ended; a refused one missed it."""
    return [
        (record.tpot_s or 0) * 1000 if record.status == 200 else float("inf") for record in records if record.status
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="1,3,5; all without it")
    parser.add_argument("--fleets", default=",".join(FLEETS))
    parser.add_argument("--block-size", type=int, default=16, help="64 simulates faster")
    options = parser.parse_args()
    with (DATA / "oracle_goodput.csv").open() as file:
        known = {tuple(row.values())[:5]: float(row["goodput_rps_total"]) for row in csv.DictReader(file)}
    rows = list(dict.fromkeys(key[1:] for key in known))
    chosen = [int(number) for number in options.rows.split(",") if number] or range(1, len(rows) + 1)
    names = options.fleets.split(",")
    print("Requests/s that keep the limits (ms), OPT-13B on two A100:\n")
    print(
        "| row | prompt | output | TTFT | TPOT | DistServe 1P+1D | 2 coloc |",
        " | ".join(f"Baton {n}" for n in names),
        end="",
    )
    print(" | first / better of DistServe's |")
    print("|---" * (8 + len(names)) + "|")
    began = time.perf_counter()
    for number in chosen:
        row = rows[number - 1]
        prompt, output, *limits = (int(value) for value in row)
        theirs = [known["disagg_1p1d", *row], known["coloc_2x_samecost", *row]]
        limits_ms = (float(limits[0]), float(limits[1]))
        ours = [baton_goodput(fleet(name, limits_ms, options.block_size), prompt, output, limits_ms) for name in names]
        cells = [str(number), *row, *(f"{rate:.2f}" for rate in (*theirs, *ours, ours[0] / max(theirs)))]
        print("|", " | ".join(cells), "|", flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
