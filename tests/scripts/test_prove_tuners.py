"""scripts/prove_tuners.py: which settings need not be run, what the cache keeps, and the tables."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from baton.sim.record import SimRecord

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.fixture
def prove(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return import_module("prove_tuners")


@pytest.fixture
def runs(prove) -> ModuleType:
    return import_module("_tuner_runs")


def test_a_limit_that_was_never_reached_needs_no_second_run(prove, runs, tmp_path):
    cache = prove.Cache(tmp_path / "results")
    job = prove.Job(tmp_path, "device", "azure-conv")
    outcome = runs.Outcome(kept=(5,), arrived=(9,), most_tokens=1500, most_sequences=20)
    cache.add(prove.Entry("device", "azure-conv", "8192x256", outcome=outcome))
    settings = {(tokens, sequences) for tokens in (2048, 4096, 8192) for sequences in (32, 64, 128, 256)}
    assert set(job.grid(cache)) == settings
    assert set(job.grid(cache).values()) == {outcome}


def test_a_limit_that_was_reached_says_nothing_of_others(prove, runs, tmp_path):
    cache = prove.Cache(tmp_path / "results")
    outcome = runs.Outcome(kept=(5,), arrived=(9,), most_tokens=2048, most_sequences=32)
    cache.add(prove.Entry("device", "azure-conv", "2048x32", outcome=outcome))
    assert set(prove.Job(tmp_path, "device", "azure-conv").grid(cache)) == {(2048, 32)}


def test_results_outlive_the_process_and_are_forgotten_on_request(prove, runs, tmp_path):
    path = tmp_path / "results"
    cache = prove.Cache(path)
    for what, kept in (("tuned", 1), ("128x1", 2), ("tuned", 3)):
        cache.add(prove.Entry("device", "azure-conv", what, outcome=runs.Outcome((kept,), (9,), 1, 1)))
    cache = prove.Cache(path)
    assert cache.get("device", "azure-conv", "tuned").outcome.kept == (3,)
    cache.forget("device", "azure-conv", tuned_only=True)
    cache = prove.Cache(path)
    assert cache.get("device", "azure-conv", "tuned") is None
    assert cache.get("device", "azure-conv", "128x1").outcome.kept == (2,)
    cache.forget("device", "azure-conv", tuned_only=False)
    assert path.read_bytes() == b""


def test_requests_at_the_same_time_are_counted_from_arrival_to_end(runs):
    records = [SimRecord(0, 0.0, 1, 200, ended_s=2.0), SimRecord(1, 1.0, 1), SimRecord(2, 1.5, 1, 429, ended_s=1.5)]
    assert runs._most_at_once(records, until=9.0) == 3
    assert runs._most_at_once([*records, SimRecord(3, 2.0, 1), SimRecord(4, 2.0, 1)], until=9.0) == 4
    assert runs._most_at_once([], until=9.0) == 0


def test_tables_compare_the_tuned_run_with_the_best_and_all_workloads_with_one_setting(prove, runs, tmp_path, capsys):
    cache = prove.Cache(tmp_path / "results")
    kept = {"azure-conv": {(128, 1): 100, (256, 1): 80}, "azure-code": {(128, 1): 10, (256, 1): 100}}
    for workload, grid in kept.items():
        conditions = runs.Conditions(300.0, 30.0, 0.95, 4.0)
        cache.add(prove.Entry("device", workload, "conditions", conditions=conditions))
        tuned = runs.Outcome((90, 9, 0, 0), (100, 20, 0, 0), 1, 1, errors=(0.05, 0.01))
        cache.add(prove.Entry("device", workload, "tuned", outcome=tuned))
        for (tokens, sequences), total in grid.items():
            outcome = runs.Outcome((total - 10, 10, 0, 0), (100, 20, 0, 0), 8192, 256)
            cache.add(prove.Entry("device", workload, f"{tokens}x{sequences}", outcome=outcome))
    jobs = [prove.Job(tmp_path, "device", workload) for workload in kept]
    prove.print_workloads(jobs, cache)
    prove.print_single(jobs, cache)
    shown = capsys.readouterr().out
    assert "| azure-conv | 300, 30.0 | 4.00 | 120 | 128 x 1 | 100 | 99 | 0.990 | 1.000 | 0.900 |" in shown
    assert "| 256 x 1, best in the mean | 0.800 | 1.000 |" in shown
    assert "| tuned | 0.990 | 0.990 |" in shown
