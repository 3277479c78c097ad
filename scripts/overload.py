"""Offer a real server several times what it can serve, then let the load fall: who was served, refused, and how soon.

    python scripts/overload.py [--factor 3] [--duration 120] [--mix chat]

The targets are 4 x and 2 x the unloaded medians, the capacity is the rate at which 90 % of the requests keep both; both
are measured first. Then `factor` times that rate comes for `duration` seconds, and after it one request a second. The
table says which of the accepted requests kept the targets, how fast the others were refused, whether the processes
grew, and how long after the fall of the load a request was as fast as on an idle server again.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from _helpers import load_module
from _mixes import MIXES, TTFT_FACTOR, Mix, Targets, capacity, offer, rows, share_kept, throughput, unloaded

from baton.bench.metrics import compute_metrics
from baton.bench.record import RequestRecord
from baton.core.trace import TraceRow

serving = load_module("tests/serving.py")
CALM_S = 20.0  # after the fall, one request a second
AS_FAST = 1.5  # times the unloaded TTFT is unloaded again
SAMPLE_S = 5.0
KV_MEMORY = "256M"  # a small pool is full, and all its memory touched, before the measurement begins


def resident_mb(pid: int) -> float:
    """Resident memory of one process; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0.0
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS:"))


@contextmanager
def memory_samples(pids: Sequence[int]) -> Iterator[list[tuple[float, float]]]:
    """(seconds, MB of all of them together), more and more of them while the block runs."""
    samples: list[tuple[float, float]] = []
    stop, start = threading.Event(), time.monotonic()

    def watch() -> None:
        while True:
            samples.append((time.monotonic() - start, sum(map(resident_mb, pids))))
            if stop.wait(SAMPLE_S):
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def overload_rows(mix: Mix, rate: float, duration_s: float, seed: int) -> list[TraceRow]:
    """The overload, then the calm: requests of the middle lengths, one a second."""
    calm = (
        TraceRow(1000 * (duration_s + second), mix.middle.input_length, mix.middle.output_length)
        for second in range(1, int(CALM_S))
    )
    return [*rows(mix, rate, duration_s, seed), *calm]


def recovery_s(records: Sequence[RequestRecord], fall_s: float, fast_s: float) -> float | None:
    """From the fall of the load to the first request that was served within `fast_s`; None: there was none."""
    after = sorted((r for r in records if (r.scheduled_s or 0.0) > fall_s), key=lambda record: record.send_s)
    return next((r.send_s - fall_s for r in after if r.error is None and r.ttft_s <= fast_s), None)


def report(
    records: Sequence[RequestRecord], duration_s: float, targets: Targets, memory: list[tuple[float, float]]
) -> None:
    """The table."""
    offered = [r for r in records if r.scheduled_s is not None and r.scheduled_s <= duration_s]
    accepted = [r for r in offered if r.error is None]
    refused = [r for r in offered if r.error is not None and r.error.startswith("HTTP 429")]
    others = [r for r in offered if r.error is not None and not r.error.startswith("HTTP 429")]
    in_time = sum(1000 * r.ttft_s <= targets.ttft_ms for r in accepted)
    waits = sorted(1000 * (r.end_s - r.send_s) for r in refused if r.end_s is not None)
    good = compute_metrics(accepted, duration_s, targets.limits_ms)
    before, *_, after = memory
    middle = memory[len(memory) // 2]
    fast_s = AS_FAST * targets.ttft_ms / TTFT_FACTOR / 1000
    recovered = recovery_s(records, duration_s, fast_s)
    print("| | |\n|---|---|")
    print(f"| targets | TTFT {targets.ttft_ms:.0f} ms, TPOT {targets.tpot_ms:.0f} ms |")
    print(f"| offered | {len(offered)} ({len(offered) / duration_s:.2f} a second) |")
    print(f"| accepted | {len(accepted)} ({len(accepted) / duration_s:.2f} a second) |")
    print(f"| of these within the TTFT target | {in_time / max(len(accepted), 1):.1%} |")
    print(f"| of these within both targets | {share_kept(good):.1%} |")
    print(f"| refused with 429 | {len(refused)} |")
    if waits:
        print(f"| after (median, greatest) | {statistics.median(waits):.0f} ms, {waits[-1]:.0f} ms |")
        late = sum(wait > targets.ttft_ms for wait in waits)
        print(f"| of these after the TTFT target | {late} |")
    print(f"| other failures | {len(others)} |")
    print(f"| memory at start, in the middle, at the end | {before[1]:.0f}, {middle[1]:.0f}, {after[1]:.0f} MB |")
    text = "never" if recovered is None else f"{recovered:.1f} s"
    print(f"| recovered (TTFT <= {1000 * fast_s:.0f} ms) after | {text} |")
    for error in sorted({str(record.error) for record in others})[:5]:
        print(f"\nfailed: {error}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--mix", default="chat", choices=MIXES)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of overload")
    parser.add_argument("--probe", type=float, default=20.0, help="seconds of each probe for the capacity")
    parser.add_argument("--capacity", type=float, help="requests/s, instead of the search")
    parser.add_argument("--json", type=Path, help="write all records to this file, one a line")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    mix = MIXES[arguments.mix]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving.serve(folder, arguments.model) as server:
            targets = unloaded(server.url, mix, seed=1)
            most = throughput(server.url, mix, seed=2)
        with serving.serve(folder, arguments.model, "--kv-memory", KV_MEMORY, *targets.flags) as server:
            rate = arguments.capacity or capacity(server.url, mix, targets, most, arguments.probe, seed=100)
            print(
                f"capacity {rate:.2f} requests/s; {arguments.factor:g} x that for {arguments.duration:g} s", flush=True
            )
            server.wait_idle()
            requests = overload_rows(mix, arguments.factor * rate, arguments.duration, seed=200)
            with memory_samples([server.process.pid, *server.children().values()]) as memory:
                records = offer(server.url, requests, seed=200).records
                server.wait_idle()
    report(records, arguments.duration, targets, memory)
    print("\nthe ledger was idle at the end, and no process was left")  # else serving.py had raised
    if arguments.json is not None:
        arguments.json.write_bytes(b"\n".join(map(msgspec.json.encode, records)))


if __name__ == "__main__":
    main()
