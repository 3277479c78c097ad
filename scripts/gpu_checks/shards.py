"""The checks spread over processes: compiling takes a core each, and a kernel that hangs or kills its process takes
only its own shard with it."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from baton.launch.child import watch_launcher

from .correctness import run_checks
from .fractions import compile_kernels
from .package import ROOT
from .report import Report, Row

MAX_SHARDS = 8


def run_shards(report: Report, device: str, *, is_tiny: bool, timeout_s: float) -> None:
    """Correctness, and a first run of each case that will be measured, so that it is compiled by then."""
    count = 2 if is_tiny else max(1, min(MAX_SHARDS, (os.cpu_count() or 2) // 2))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{shard}.json" for shard in range(count)]
        children = [_start(file, device, shard, count, is_tiny=is_tiny) for shard, file in enumerate(files)]
        try:
            _wait(report, children, files, timeout_s)
        finally:
            for child in children:
                child.kill()
                child.wait()


def _start(file: Path, device: str, shard: int, count: int, *, is_tiny: bool) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", str(ROOT / "scripts" / "gpu_check"), "--shard", device, f"{shard}/{count}"]
    command += [str(file), *(["--dry-run"] if is_tiny else [])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _wait(report: Report, children: list["subprocess.Popen[bytes]"], files: list[Path], timeout_s: float) -> None:
    for shard, (child, file) in enumerate(zip(children, files, strict=True)):
        left = max(1.0, min(timeout_s, report.seconds_left))
        try:
            problem = "" if child.wait(left) == 0 else f"exit code {child.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {timeout_s:.0f} s"
        for line in file.read_text().splitlines() if file.exists() else ():
            report.add(Row(**json.loads(line)))
        if problem:
            report.add(Row("correctness", f"shard {shard} of {len(children)}", "did not finish", problem, False))


def run_one_shard(device: str, part: str, file: Path, *, is_tiny: bool) -> None:
    """In the child, which ends with its parent: rows go to the file as they come, a line of JSON each."""
    watch_launcher(sys.stdin.fileno())
    shard, count = (int(number) for number in part.split("/"))
    with file.open("w") as lines:
        for row in run_checks(torch.device(device), shard, count, is_tiny=is_tiny):
            lines.write(json.dumps(asdict(row), default=str) + "\n")
            lines.flush()
    compile_kernels(torch.device(device), shard, count, is_tiny=is_tiny)
