"""The tuners on a real server against fixed settings, and how well learned costs predict another workload.

    python scripts/measure_tuning.py [--results FILE [--runs N]] [--rounds 3] [--measure 40] [--settle 8]

For each of two workloads: targets are 4 x and 2 x the unloaded medians, the capacity is the rate at which 90 % of the
requests keep both, and the rate offered is a share of it. Then every setting of a small grid (tokens a step x running
requests, forced by flags) and the tuners take turns, each on a fresh server that has been under the same load for some
seconds, with the same requests for all in one round. Goodput is that of `baton bench`: requests a second that keep both
targets. All settings have the targets, so admission is the same.

Last, on servers that have learned their costs from one workload alone, the other one runs: what the costs predict for
its forward passes, all together, against what they took.

With --results FILE what was measured is kept there, a line each, and a second start goes on where the first one ended;
with --runs N it measures N things, of a minute or two each, and leaves the rest to the next start.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
from _helpers import load_module
from _mixes import MIXES, Mix, Targets, capacity, offer, rows, share_kept, throughput, unloaded

from baton.bench.metrics import compute_metrics
from baton.core.step_cost import StepCost, StepTotals

serving = load_module("tests/serving.py")
GRID = tuple((budget, cap) for budget in (64, 512) for cap in (4, 64))  # tokens a step, running requests
TUNED = "tuned"
LOAD = 0.85  # of the capacity


class AllForNowError(Exception):
    """As much was measured as this start should."""


class Line(msgspec.Struct, frozen=True):
    """One measured thing: `values` by name. `key` says which, and is not measured twice."""

    key: str
    values: dict[str, float]


class Notebook:
    """What was measured, in a file when there is one; no more than `num_new` things are added, or few more."""

    def __init__(self, path: Path | None, num_new: float):
        self._path = path
        self._num_left = num_new
        self._lines: dict[str, dict[str, float]] = {}
        if path is not None and path.exists():
            for text in path.read_bytes().splitlines():
                line = msgspec.json.decode(text, type=Line)
                self._lines[line.key] = line.values

    def get(self, key: str) -> dict[str, float] | None:
        """None: it is to be measured now. Raises AllForNowError when it should be, but not by this start."""
        if key not in self._lines and self._num_left <= 0:
            raise AllForNowError
        return self._lines.get(key)

    def add(self, key: str, values: dict[str, float]) -> dict[str, float]:
        self._lines[key] = values
        self._num_left -= 1
        print(f"{key}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()), flush=True)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(Line(key, values)) + b"\n")
        return values


class Measuring:
    """All measurements, each made once."""

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        self._arguments = arguments
        self._folder = folder
        self._notebook = Notebook(arguments.results, arguments.runs)

    def targets(self, mix: Mix) -> Targets:
        found = self._unhurried(mix)
        return Targets(found["ttft_ms"], found["tpot_ms"])

    def _unhurried(self, mix: Mix) -> dict[str, float]:
        """The targets, and the greatest throughput, of a server that has none."""
        key = f"{mix.name} targets"
        if (found := self._notebook.get(key)) is None:
            with self._serve() as server:
                targets = unloaded(server.url, mix, seed=1)
                most = throughput(server.url, mix, seed=2)
            found = self._notebook.add(key, {**msgspec.structs.asdict(targets), "throughput": most})
        return found

    def rate(self, mix: Mix) -> float:
        """Requests a second that are offered."""
        key = f"{mix.name} capacity"
        if (found := self._notebook.get(key)) is None:
            targets, most = self.targets(mix), self._unhurried(mix)["throughput"]
            with self._serve(*targets.flags) as server:
                rate = capacity(server.url, mix, targets, most, self._arguments.measure / 2, seed=100)
                found = self._notebook.add(key, {"rate": rate})
        return LOAD * found["rate"]

    def goodput(self, mix: Mix, setting: str, number: int) -> float:
        """Of one round, in requests a second."""
        key = f"{mix.name} {setting} round {number}"
        if (found := self._notebook.get(key)) is None:
            targets, rate = self.targets(mix), self.rate(mix)
            settle = self._arguments.settle
            before, measured = rows(mix, rate, settle, 1000 + number), rows(mix, rate, self._arguments.measure, number)
            moved = [msgspec.structs.replace(row, timestamp=row.timestamp + 1000 * settle) for row in measured]
            with self._serve(*targets.flags, *flags_of(setting)) as server:
                records = offer(server.url, [*before, *moved], number).records
                settings = {
                    f"{worker['id']} {name}": value
                    for worker in tuner(server)
                    for name, value in worker["settings"].items()
                }
            counted = [record for record in records if record.session >= len(before)]
            metrics = compute_metrics(counted, self._arguments.measure, targets.limits_ms)
            assert metrics.request_goodput is not None
            found = self._notebook.add(
                key, {"goodput": metrics.request_goodput, "kept": share_kept(metrics), **settings}
            )
        return found["goodput"]

    def prediction(self, first: Mix, second: Mix, number: int) -> dict[str, float]:
        """Worker |-> (predicted / measured - 1) of the time that the second workload's forward passes took."""
        key = f"learned on {first.name}, checked on {second.name}, round {number}"
        if (found := self._notebook.get(key)) is not None:
            return found
        seconds = self._arguments.measure / 2
        with self._serve() as server:
            offer(server.url, rows(first, self.rate(first), seconds, 2000 + number), 2000 + number)
            server.wait_idle()
            learned = {worker["id"]: worker for worker in tuner(server)}
            offer(server.url, rows(second, self.rate(second), seconds, 3000 + number), 3000 + number)
            server.wait_idle()
            errors = {worker["id"]: relative_error(learned[worker["id"]], worker) for worker in tuner(server)}
        return self._notebook.add(key, errors)

    @contextmanager
    def _serve(self, *flags: str) -> Iterator[Any]:
        with serving.serve(self._folder, self._arguments.model, *flags) as server:
            yield server


def flags_of(setting: str) -> tuple[str, ...]:
    if setting == TUNED:
        return ()
    budget, cap = setting.split(" x ")
    return "--token-budget", budget, "--max-running", cap


def tuner(server: Any) -> list[dict[str, Any]]:
    status, answer = server.request("GET", "/tuner")
    assert status == 200, answer
    return answer["workers"]


def relative_error(learned: dict[str, Any], then: dict[str, Any]) -> float:
    """Of the cost learned until the first of two answers of /tuner, over the steps between them."""
    cost = StepCost(**learned["step_cost"])
    before, after = StepTotals(**learned["steps"]), StepTotals(**then["steps"])
    between = StepTotals(*(getattr(after, name) - getattr(before, name) for name in StepTotals.__struct_fields__))
    return cost.seconds_of(between) / between.seconds - 1.0


def show(name: str, goodputs: dict[str, list[float]]) -> None:
    """The table of one workload, best first, and what the tuners reach of it."""
    medians = {setting: statistics.median(values) for setting, values in goodputs.items()}
    best = max((setting for setting in medians if setting != TUNED), key=lambda setting: medians[setting])
    print(f"\n{name}\n\n| tokens a step x running | goodput, median | least | greatest |\n|---|---|---|---|")
    for setting in sorted(medians, key=lambda setting: -medians[setting]):
        values = goodputs[setting]
        print(f"| {setting} | {medians[setting]:.3f} | {min(values):.3f} | {max(values):.3f} |")
    print(f"\ntuned / best fixed ({best}): {medians[TUNED] / medians[best]:.3f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--results", type=Path, help="keep what was measured in this file, and go on from it")
    parser.add_argument("--runs", type=int, default=math.inf, help="with --results: measure so many things at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", type=float, default=40.0, help="seconds of each measurement")
    parser.add_argument("--settle", type=float, default=8.0, help="seconds of the same load before it")
    return parser.parse_args()


def measure_all(measuring: Measuring, num_rounds: int) -> None:
    settings = [f"{budget} x {cap}" for budget, cap in GRID] + [TUNED]
    goodputs: dict[str, dict[str, list[float]]] = {name: {setting: [] for setting in settings} for name in MIXES}
    for number in range(num_rounds):
        turn = number % len(settings)
        for mix in MIXES.values():
            for setting in settings[turn:] + settings[:turn]:
                goodputs[mix.name][setting].append(measuring.goodput(mix, setting, number))
    for name, its in goodputs.items():
        show(name, its)
    for first, second in permutations(MIXES.values()):
        errors = [measuring.prediction(first, second, number) for number in range(num_rounds)]
        print(f"\npredicted / measured - 1, learned on {first.name}, checked on {second.name}:")
        for worker in errors[0]:
            of = [error[worker] for error in errors]
            print(f"{worker}: median {statistics.median(of):+.1%}, from {min(of):+.1%} to {max(of):+.1%}", flush=True)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        try:
            measure_all(Measuring(arguments, Path(folder)), arguments.rounds)
        except AllForNowError:
            print("more is to be measured: start again with the same --results", flush=True)


if __name__ == "__main__":
    main()
