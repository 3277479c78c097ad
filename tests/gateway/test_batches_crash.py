"""A batch survives a kill at every step on disk: see batches_crash.py, which runs in a process without threads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_kill_at_every_step_loses_no_line_and_doubles_none(tmp_path: Path) -> None:
    script = Path(__file__).with_name("batches_crash.py")
    command = [sys.executable, "-P", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["wrong"] == {}, done.stderr[-3000:]
    assert report["lives"] > 40
