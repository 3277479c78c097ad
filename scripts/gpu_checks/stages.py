"""The order of the stages, and how much time each must find left to start."""

import os
import sys
import threading
from pathlib import Path

import torch

from . import correctness, fractions, rival
from .facts import add_limits, find_facts
from .fractions import limits_of, measure_kernels, run_kernels
from .one_process import LARGE, SMALL, OneProcess
from .report import Report, Row
from .rival import beside_transformers
from .shards import run_shards
from .two_processes import TwoProcesses

SHARDS_TIMEOUT_S = 150.0
GRACE_S = 20.0
EXIT_OK, EXIT_FAILED, EXIT_NOT_JUDGED = 0, 1, 3


def run_all(device_type: str, minutes: float, json: Path, *, is_tiny: bool) -> int:
    """Everything; returns the exit status. What was found so far is in the file whatever happens."""
    if device_type == "cuda" and not torch.cuda.is_available():
        sys.exit(f"gpu_check: torch {torch.__version__} sees no GPU. Without one: scripts/gpu_check --dry-run")
    report, device = Report(minutes), torch.device(device_type)
    facts: dict[str, object] = {}

    def give_up() -> None:
        """Something hangs. Workers and shards end with this process."""
        report.add(Row("gpu_check", "the time is long over", "given up", "", False))
        _summary(report)
        report.write(json, facts)
        sys.stdout.flush()
        os._exit(EXIT_FAILED)

    watchdog = threading.Timer(60 * minutes + GRACE_S, give_up)
    watchdog.daemon = True
    watchdog.start()
    report.stage("facts", 0, lambda: facts.update(find_facts(report, device, is_tiny=is_tiny)))
    try:
        _run_stages(report, device, is_tiny=is_tiny)
    finally:
        report.add(Row("two procs", "NCCL", "unproven", "it refuses two ranks on one card"))
        _summary(report)
        report.write(json, facts)
        print(f"all rows are in {json}")
    return exit_status(report, is_dry_run=is_tiny)


def exit_status(report: Report, *, is_dry_run: bool) -> int:
    """What failed weighs more than what was not judged; a dry run judges no speed."""
    if report.num_failed:
        return EXIT_FAILED
    return EXIT_NOT_JUDGED if report.not_judged and not is_dry_run else EXIT_OK


def _run_stages(report: Report, device: torch.device, *, is_tiny: bool) -> None:
    def stage(name: str, needs_s: float, work: object) -> None:
        report.stage(name, 0 if is_tiny else needs_s, work)  # type: ignore[arg-type]

    timeout_s = SHARDS_TIMEOUT_S
    one = OneProcess(report, device, is_tiny=is_tiny)
    two = TwoProcesses(report, device.type, is_tiny=is_tiny)
    first, *others = two.transports
    report.goals += [*correctness.goals(is_tiny=is_tiny), *fractions.goals(is_tiny=is_tiny), *rival.goals(SMALL)]
    report.goals += [*one.speed_goals(LARGE), *one.sameness_goals(SMALL), *([] if is_tiny else one.speed_goals(SMALL))]
    report.goals += two.goals(SMALL if is_tiny else LARGE, first, with_death=True)
    report.goals += [goal for transport in others for goal in two.goals(SMALL, transport, with_death=False)]
    stage("correctness", 30, lambda: run_shards(report, device.type, is_tiny=is_tiny, timeout_s=timeout_s))
    limits = None if is_tiny else limits_of(device)
    one.limits = limits
    add_limits(report, limits)
    if limits is None:
        stage("fraction", 0, lambda: run_kernels(report, device))
    else:
        stage("fraction", 60, lambda: measure_kernels(report, device, limits))
    stage("speed", 40, lambda: one.speed(LARGE))
    stage("two procs", 40, lambda: two.run(SMALL if is_tiny else LARGE, first, with_death=True))
    stage("sameness", 30, lambda: one.sameness(SMALL))
    for transport in others:
        stage("two procs", 30, lambda transport=transport: two.run(SMALL, transport, with_death=False))
    if not is_tiny:
        stage("speed", 25, lambda: one.speed(SMALL))
    stage("rival", 20, lambda: beside_transformers(report, one, SMALL, is_tiny=is_tiny))


def _summary(report: Report) -> None:
    """What has a verdict comes once more, at the end, where it is read."""
    judged = [row for row in report.rows if row.ok is not None and row.stage != "correctness"]
    failed = [row for row in report.rows if row.ok is False]
    correct = [row for row in report.rows if row.stage == "correctness" and row.ok is not None]
    print(f"\n{sum(row.ok is True for row in correct)} of {len(correct)} checks of kernels passed; goals:")
    for row in judged:
        print(row.line())
    print(f"{len(failed)} rows failed or missed a goal" + (":" if failed else ""))
    for row in failed:
        print(row.line())
    if report.not_judged:
        print(f"not judged: {len(report.not_judged)} goals:")
        print("".join(f"    {goal}\n" for goal in report.not_judged), end="")
