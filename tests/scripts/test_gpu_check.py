"""scripts/gpu_check: its pure parts, and all of it in a dry run."""

import asyncio
import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def load(monkeypatch):
    """`load("report")`: a module of scripts/gpu_checks."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))

    def load(name: str) -> ModuleType:
        return import_module(f"gpu_checks.{name}")

    return load


def test_a_stage_that_fails_is_a_row_and_the_next_goes_on(load):
    report_module = load("report")
    report = report_module.Report(8, clock=lambda: 0.0, echo=False)

    def fail() -> None:
        raise ValueError("why\ndetails")

    report.stage("first", 10, fail)
    report.stage("second", 10, lambda: report.add(report_module.Row("second", "it", "runs", ok=True)))
    assert [(row.stage, row.name, row.ok) for row in report.rows] == [
        ("first", "ValueError: why", False),
        ("first", "stage ended", None),
        ("second", "it", True),
        ("second", "stage ended", None),
    ]
    assert "details" in report.rows[0].data["traceback"]
    assert report.num_failed == 1


def test_a_stage_without_enough_time_is_skipped_and_said(load, tmp_path):
    now = 0.0
    report = load("report").Report(1, clock=lambda: now, echo=False)
    now = 45.0
    ran = []
    report.stage("long", 20, lambda: ran.append("long"))
    report.stage("short", 10, lambda: ran.append("short"))
    assert ran == ["short"]
    assert report.rows[0].line().split() == ["long", "skipped", "no", "time", "15", "s", "left,", "20", "s", "needed"]
    report.write(tmp_path / "r.json", {"card": "none"})
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["facts"] == {"card": "none"}
    assert content["rows"][0]["data"] == {"skipped": True}


def test_a_goal_without_a_verdict_is_listed_and_is_no_success(load, tmp_path, capsys):
    stages, Row = load("stages"), load("report").Row
    report = load("report").Report(8, clock=lambda: 0.0, echo=False)
    report.goals = [("fraction", "met"), ("fraction", "no profile"), ("two procs", "never begun")]
    report.add(Row("fraction", "met", "90 %", ok=True))
    report.add(Row("fraction", "no profile", "no profile"))
    assert report.not_judged == ["fraction: no profile", "two procs: never begun"]
    assert stages.exit_status(report, is_dry_run=False) == 3
    assert stages.exit_status(report, is_dry_run=True) == 0
    stages._summary(report)
    printed = capsys.readouterr().out
    assert printed.endswith("not judged: 2 goals:\n    fraction: no profile\n    two procs: never begun\n")
    report.write(tmp_path / "r.json", {})
    assert json.loads((tmp_path / "r.json").read_text())["not_judged"] == report.not_judged
    report.add(Row("fraction", "no profile", "30 us", ok=False))
    assert stages.exit_status(report, is_dry_run=False) == 1
    report.rows.pop()
    for stage, name in report.goals[1:]:
        report.add(Row(stage, name, "good", ok=True))
    assert stages.exit_status(report, is_dry_run=False) == 0


def test_over_another_transport_only_faults_are_judged(load):
    two_processes = load("two_processes")
    report = load("report").Report(8, clock=lambda: 0.0, echo=False)
    two = two_processes.TwoProcesses(report, "cuda", is_tiny=False)
    refused = two_processes.HandOverPath("m", "cuda_ipc", "pinned_memory")
    two._row(refused, "tokens", "equal", "", True, {})
    two._row(refused, "tokens", "differ", "", False, {})
    two._row(two_processes.HandOverPath("m", "tcp", "tcp"), "tokens", "equal", "", True, {})
    assert [(row.name, row.ok, row.beside) for row in report.rows] == [
        ("m, cuda_ipc: tokens", None, "over pinned_memory"),
        ("m, cuda_ipc: tokens", False, "over pinned_memory"),
        ("m, tcp: tokens", True, ""),
    ]
    assert report.rows[0].data["transport"] == "pinned_memory"


def _play_death(load, *, handed_over_after_ns: int, tokens: list[int]) -> object:
    """The row of a prefill worker killed in a fleet that is played; decode alone says [1, 2]."""
    fleet_module, two_processes, core = load("fleet"), load("two_processes"), import_module("baton.core.timeline")
    report = load("report").Report(8, clock=lambda: 0.0, echo=False)
    two = two_processes.TwoProcesses(report, "cuda", is_tiny=True)
    status = SimpleNamespace(num_kv_bytes_received=0)

    class PlayedFleet:
        killed_ns = 0

        def entry(self, role):
            return SimpleNamespace(status=status)

        def generate(self, prompt, max_tokens, *, through_prefill):
            return fleet_module.Answer(token_ids=list(tokens) if through_prefill else [1, 2])

        async def until(self, condition, timeout_s, what):
            status.num_kv_bytes_received = 1
            assert condition()

        def kill(self, role):
            self.killed_ns = time.monotonic_ns()

        async def finish(self, answer, timeout_s):
            at = self.killed_ns + handed_over_after_ns
            answer.timeline = core.Timeline().stamped(core.Station.HANDED_OVER, at)
            return answer

    path = two_processes.HandOverPath("m", "tcp", "tcp")
    asyncio.run(two._death(path, PlayedFleet(), [1] * 30))
    return report.rows[0]


def test_a_death_after_the_hand_over_proves_nothing(load):
    second = 10**9
    assert _play_death(load, handed_over_after_ns=second, tokens=[1, 2]).ok is True
    late = _play_death(load, handed_over_after_ns=-second, tokens=[1, 2])
    assert (late.ok, late.value) == (None, "tokens equal")
    assert "not judged: too late" in late.beside
    assert _play_death(load, handed_over_after_ns=-second, tokens=[1, 3]).ok is False


def test_the_goals_of_a_card_by_name(load):
    fractions, one_process = load("fractions"), load("one_process")
    goals = [name for _, name in fractions.goals(is_tiny=False)]
    assert "Llama-3.1-8B: decode attention, 8 x 32,768" in goals
    assert "Llama-3.1-8B: add, rms norm, 8,192 rows" in goals
    assert not any("torch" in name or "cuBLAS" in name for name in goals)
    one = one_process.OneProcess(None, None, is_tiny=False)
    assert [name for _, name in one.speed_goals("Llama-3.1-8B")] == [
        "Llama-3.1-8B: decode 1 x 1024",
        "Llama-3.1-8B: decode 256 x 1024",
        *(f"Llama-3.1-8B: decode {batch}: device between steps" for batch in (1, 8, 64, 256)),
    ]


def test_pauses_of_a_device(load):
    busy_part = load("decoding").busy_part
    # two streams overlap from 2 to 4; nothing runs from 6 to 9
    assert busy_part([(0.0, 4.0), (2.0, 6.0), (9.0, 10.0)]) == (pytest.approx(0.7), 3.0)
    assert busy_part([(5.0, 6.0)]) == (1.0, 0.0)


def test_random_weights_are_the_same_in_every_process(load, tmp_path):
    package = load("package")
    folder = package.model_files(tmp_path / "model", "Qwen3-0.6B", is_tiny=True)
    safetensors = package._random_safetensors("cpu")
    first, second = (safetensors.safe_open(folder / "model.safetensors", framework="pt") for _ in range(2))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert first.get_tensor(name).equal(second.get_tensor(name))
    assert not first.get_tensor(name).equal(first.get_tensor("model.layers.0.self_attn.o_proj.weight").t())
    assert first.get_tensor("model.norm.weight").tolist() == [1.0] * 32
    (tmp_path / "other.safetensors").write_text("{}")
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(tmp_path / "other.safetensors")


def test_the_stand_in_for_xxhash_sees_a_changed_byte(load):
    stand_in = load("package")._xxhash_stand_in()
    assert len(stand_in.xxh3_64_digest(b"abc")) == 8
    assert stand_in.xxh3_64_intdigest(memoryview(b"abc")) != stand_in.xxh3_64_intdigest(b"abd")
    assert 0 <= stand_in.xxh3_64_intdigest(b"") < 2**64


def test_without_a_gpu_it_says_so(tmp_path):
    result = _gpu_check("--json", str(tmp_path / "r.json"), environment={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 1
    assert "sees no GPU" in result.stderr
    assert "--dry-run" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_dry_run_walks_every_stage(tmp_path):
    result = _gpu_check("--dry-run", "--json", str(tmp_path / "r.json"), environment={})
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    content = json.loads((tmp_path / "r.json").read_text())
    rows = content["rows"]
    assert [row for row in rows if row["ok"] is False or row["data"].get("skipped")] == []
    stages = {row["stage"] for row in rows}
    assert stages == {
        *("facts", "correctness", "limits", "fraction", "speed", "one process", "sameness", "two procs", "rival")
    }
    assert sum(row["stage"] == "correctness" and row["ok"] is True for row in rows) == 14
    names = {f"{row['stage']}: {row['name']}" for row in rows}
    assert set(content["not_judged"]) <= names, "every goal is the name of a row"
    assert not any(unit in row["value"] + row["beside"] for row in rows for unit in ("%", " us", " ms", "TB/s", "FLOP"))
    assert not any("cuBLAS" in name for name in names)
    judged = {row["name"]: row["ok"] for row in rows if row["stage"] == "two procs" and row["ok"] is not None}
    judged.setdefault("Qwen3-0.6B, shared_memory: prefill killed", True)  # without a verdict where it came too late
    assert judged == {
        "Qwen3-0.6B, shared_memory: 9 tokens: tokens of both ways": True,
        "Qwen3-0.6B, shared_memory: prefill killed": True,
        "Qwen3-0.6B, shared_memory: decode after that": True,
        "Qwen3-0.6B, tcp: 9 tokens: tokens of both ways": True,
    }


def _gpu_check(*arguments: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", str(ROOT / "scripts" / "gpu_check"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=380, check=False, env={**os.environ, **environment}
    )
