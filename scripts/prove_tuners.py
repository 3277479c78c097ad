"""Do the tuners find what a grid search finds? Baton's own code on a device cost model, under steps of load.

    python scripts/prove_tuners.py --data FOLDER --cache results.jsonl
    python scripts/prove_tuners.py --data FOLDER --cache results.jsonl --workloads azure-conv --tuned-only --fresh

For each workload (a trace of FOLDER, see WORKLOADS) one prefill and one decode worker serve four steps of load of 5
virtual minutes each, 0.5 -> 0.9 -> 1.2 -> 0.5 of capacity. Targets: 4 x the unloaded median TTFT, 2 x the unloaded
median TPOT, the same for all fleets. Capacity: the rate at which 0.9 of the requests that keep both targets when they
are alone still do, with the default settings, by bisection, when the trace's requests come steadily (a Poisson
process; a bursty trace has no such rate); the steps of load have the trace's own bursts. Goodput: requests that kept
both targets, of those that arrived later than 60 s after a step of load began.

Fixed settings: {128, 256 ... 8192} tokens per step (and per chunk) x {1, 2, 4 ... 256} running sequences. A limit that
was never reached gives the same run as any larger one, which is then not run. Every result is appended to the cache
file, so that a run can be stopped and resumed. Code that changed is not noticed: --fresh forgets what was measured.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import msgspec
from _tuner_runs import BUDGETS, CAPS, HELD_OUT, LOADS, WORKLOADS, Conditions, Outcome, measure_conditions, run_steps

from baton.core.errors import BatonError, ConfigurationError

MODELS = ("llama3.1-70b-bf16-tp4-h100", "qwen3-30b-a3b-bf16-tp1-h200")
HELD_OUT_MODEL = "llama3.1-70b-bf16-tp4-a100"


class Entry(msgspec.Struct, frozen=True):
    """A line of the cache. `what`: "conditions", "tuned", or the fixed setting "TOKENSxSEQUENCES"."""

    model: str
    workload: str
    what: str
    conditions: Conditions | None = None
    outcome: Outcome | None = None


class Cache:
    """What has been measured. One line each; the last one with a key counts."""

    def __init__(self, path: Path):
        self._path = path
        lines = path.read_bytes().splitlines() if path.exists() else []
        entries = [msgspec.json.decode(line, type=Entry) for line in lines]
        self._entries = {(entry.model, entry.workload, entry.what): entry for entry in entries}

    def forget(self, model: str, workload: str, *, tuned_only: bool) -> None:
        """Its fixed settings and conditions too, unless `tuned_only`."""
        for entry in list(self._entries.values()):
            if (entry.model, entry.workload) == (model, workload) and (entry.what == "tuned" or not tuned_only):
                del self._entries[model, workload, entry.what]
        self._path.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in self._entries.values()))

    def get(self, model: str, workload: str, what: str) -> Entry | None:
        return self._entries.get((model, workload, what))

    def add(self, entry: Entry) -> None:
        self._entries[entry.model, entry.workload, entry.what] = entry
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")


# ---- all runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    data: Path
    model: str
    workload: str

    def conditions(self, cache: Cache) -> Conditions | None:
        entry = cache.get(self.model, self.workload, "conditions")
        return entry.conditions if entry else None

    def outcome(self, cache: Cache, what: str) -> Outcome | None:
        entry = cache.get(self.model, self.workload, what)
        return entry.outcome if entry else None

    def grid(self, cache: Cache) -> dict[tuple[int, int], Outcome]:
        """The points that are known, those that are equal to one that was run included."""
        found: dict[tuple[int, int], Outcome] = {}
        for tokens, sequences in points():
            outcome = self.outcome(cache, f"{tokens}x{sequences}")
            if outcome is None:
                equal = (known for point, known in found.items() if _is_equal(point, known, (tokens, sequences)))
                outcome = next(equal, None)
            if outcome is not None:
                found[tokens, sequences] = outcome
        return found


def points() -> Iterator[tuple[int, int]]:
    """The greatest limits first: they tell which others are never reached."""
    return ((tokens, sequences) for tokens in reversed(BUDGETS) for sequences in reversed(CAPS))


def _is_equal(known: tuple[int, int], outcome: Outcome, other: tuple[int, int]) -> bool:
    """Whether the run with other limits would be the same as a known one."""
    used = (outcome.most_tokens, outcome.most_sequences)
    return all(mine == its or used_up < min(mine, its) for mine, its, used_up in zip(known, other, used, strict=True))


def run_all(jobs: Sequence[Job], cache: Cache, num_processes: int, *, tuned_only: bool) -> None:
    """What the cache does not have yet."""
    with ProcessPoolExecutor(num_processes) as pool:
        unknown = [job for job in jobs if job.conditions(cache) is None]
        found = [pool.submit(measure_conditions, job.data, job.model, job.workload) for job in unknown]
        for job, future in zip(unknown, found, strict=True):
            cache.add(Entry(job.model, job.workload, "conditions", conditions=future.result()))
            print(f"{job.model} {job.workload}: {job.conditions(cache)}", file=sys.stderr, flush=True)
        running: dict[Future[Outcome], tuple[Job, str]] = {}
        for job in jobs:
            for setting in (None, *(() if tuned_only else points())):
                while len(running) >= num_processes:
                    _collect(cache, running)
                what = "tuned" if setting is None else "{}x{}".format(*setting)
                known = job.outcome(cache, what) if setting is None else job.grid(cache).get(setting)
                conditions = job.conditions(cache)
                if known is None and conditions is not None:
                    future = pool.submit(run_steps, job.data, job.model, job.workload, conditions, setting)
                    running[future] = job, what
        while running:
            _collect(cache, running)


def _collect(cache: Cache, running: dict[Future[Outcome], tuple[Job, str]]) -> None:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        (job, what), outcome = running.pop(future), future.result()
        cache.add(Entry(job.model, job.workload, what, outcome=outcome))
        print(f"{job.workload} {what}: {outcome.total} of {sum(outcome.arrived)}", file=sys.stderr, flush=True)


# ---- tables ------------------------------------------------------------------------------------------------------


def print_workloads(jobs: Sequence[Job], cache: Cache) -> None:
    """Tuned over best fixed: over all, by step of load, and by step beside the setting that is best in that step."""
    steps = " | ".join(f"{load:g}" for load in LOADS)
    names = f"workload | targets (ms) | capacity (/s) | arrived | best fixed | kept | tuned kept | ratio | {steps}"
    print(f"| {names} | each step's best | prediction error |")
    print("|" + " --- |" * (10 + len(LOADS)))
    for job in jobs:
        conditions, tuned, grid = job.conditions(cache), job.outcome(cache, "tuned"), job.grid(cache)
        if conditions is None or tuned is None or not grid:
            continue
        point, best = best_of(grid)
        tops = [max(outcome.kept[step] for outcome in grid.values()) for step in range(len(LOADS))]
        cells = (
            job.workload,
            f"{conditions.ttft_ms:.0f}, {conditions.tpot_ms:.1f}",
            f"{conditions.capacity:.2f}",
            str(sum(tuned.arrived)),
            f"{point[0]} x {point[1]}",
            str(best.total),
            str(tuned.total),
            _ratio(tuned.total, best.total),
            *(_ratio(mine, its) for mine, its in zip(tuned.kept, best.kept, strict=True)),
            ", ".join(_ratio(mine, top) for mine, top in zip(tuned.kept, tops, strict=True)),
            ", ".join(f"{error:.1%}" for error in tuned.errors),
        )
        print("| " + " | ".join(cells) + " |")


def print_single(jobs: Sequence[Job], cache: Cache) -> None:
    """The fixed settings with the greatest share of each best, in the mean and in the worst case, beside the tuners."""
    grids = {job: grid for job in jobs if (grid := job.grid(cache)) and job.outcome(cache, "tuned")}
    best = {job: max(best_of(grid)[1].total, 1) for job, grid in grids.items()}
    shared = [point for point in points() if all(point in grid for grid in grids.values())]
    if not shared:
        return

    def shares(point: tuple[int, int]) -> list[float]:
        return [grid[point].total / best[job] for job, grid in grids.items()]

    rows = {f"{t} x {s}, best in the mean": shares((t, s)) for t, s in [max(shared, key=lambda p: sum(shares(p)))]}
    rows |= {f"{t} x {s}, best where worst": shares((t, s)) for t, s in [max(shared, key=lambda p: min(shares(p)))]}
    rows["tuned"] = [outcome.total / best[job] for job in grids if (outcome := job.outcome(cache, "tuned"))]
    print("\nOne setting for all, share of each best fixed one's goodput:\n")
    print("| setting | " + " | ".join(f"{job.workload}, {job.model}" for job in grids) + " |")
    print("|" + " --- |" * (len(grids) + 1))
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(f"{share:.3f}" for share in values) + " |")


def best_of(grid: dict[tuple[int, int], Outcome]) -> tuple[tuple[int, int], Outcome]:
    return max(grid.items(), key=lambda item: item[1].total)


def _ratio(mine: int, other: int) -> str:
    return f"{mine / other:.3f}" if other else "-"


def print_grid(job: Job, cache: Cache) -> None:
    """Goodput of every fixed setting."""
    grid = job.grid(cache)
    print(f"\n{job.workload}: kept both targets, tokens by sequences\n")
    print("| | " + " | ".join(str(sequences) for sequences in CAPS) + " |")
    print("|" + " --- |" * (len(CAPS) + 1))
    for tokens in BUDGETS:
        row = (grid.get((tokens, sequences)) for sequences in CAPS)
        print(f"| {tokens} | " + " | ".join(str(outcome.total) if outcome else "" for outcome in row) + " |")


# ---- the command -------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--cache", type=Path, required=True, help="file of results; made when it is not there")
    parser.add_argument("--fresh", action="store_true", help="forget the results of these workloads and models")
    parser.add_argument("--fresh-tuned", action="store_true", help="forget only the tuned ones of them")
    parser.add_argument("--workloads", help=f"of {', '.join(WORKLOADS | HELD_OUT)}; default: the first four")
    parser.add_argument("--models", default=",".join(MODELS), help="of sim/step_times.json")
    parser.add_argument("--held-out", action="store_true", help=f"what nothing was tuned on, and {HELD_OUT_MODEL}")
    parser.add_argument("--tuned-only", action="store_true", help="no grid beyond what is cached")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--grids", action="store_true", help="print the goodput of every setting, too")
    return parser.parse_args()


def chosen_jobs(options: argparse.Namespace) -> list[Job]:
    names = options.workloads.split(",") if options.workloads else list(WORKLOADS)
    if unknown := [name for name in names if name not in WORKLOADS | HELD_OUT]:
        raise ConfigurationError(f"--workloads: no {', '.join(unknown)}; there are {', '.join(WORKLOADS | HELD_OUT)}")
    models = options.models.split(",")
    if options.held_out:
        held_out = [Job(options.data, model, name) for model in models for name in HELD_OUT]
        return held_out + [Job(options.data, HELD_OUT_MODEL, name) for name in WORKLOADS | HELD_OUT]
    return [Job(options.data, model, name) for model in models for name in names]


def main() -> None:
    options = parse_arguments()
    try:
        jobs = chosen_jobs(options)
        cache = Cache(options.cache)
        for job in jobs:
            if options.fresh or options.fresh_tuned:
                cache.forget(job.model, job.workload, tuned_only=not options.fresh)
        run_all(jobs, cache, options.processes, tuned_only=options.tuned_only)
    except BatonError as error:
        sys.exit(f"prove_tuners: {error}")
    for model in dict.fromkeys(job.model for job in jobs):
        of_model = [job for job in jobs if job.model == model]
        print(f"\n{model}\n")
        print_workloads(of_model, cache)
        if options.grids:
            for job in of_model:
                print_grid(job, cache)
    print_single(jobs, cache)


if __name__ == "__main__":
    main()
