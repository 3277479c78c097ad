"""scripts/overload.py, measure_tuning.py and what they offer: the arithmetic. The servers are not started here."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from baton.bench.metrics import compute_metrics
from baton.bench.record import RequestRecord
from baton.core.step_cost import StepTotals

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return import_module


@pytest.fixture
def mixes(load) -> ModuleType:
    return load("_mixes")


def record(at: float, ttft: float | None, tpot: float = 0.01) -> RequestRecord:
    """Due and sent at `at`, two tokens; `ttft` None: refused after 5 ms."""
    if ttft is None:
        return RequestRecord(session=0, turn=0, send_s=at, scheduled_s=at, error="HTTP 429: full", end_s=at + 0.005)
    times = [at + ttft, at + ttft + tpot]
    return RequestRecord(
        session=0, turn=0, send_s=at, scheduled_s=at, chunk_times_s=times, output_tokens=2, end_s=times[1]
    )


def test_a_load_has_its_rate_its_lengths_and_its_seed(mixes):
    mix = mixes.Mix("short", (3, 5), (1, 2))
    requests = mixes.rows(mix, rate=10.0, duration_s=20.0, seed=1)
    assert len(requests) == 201
    assert (requests[0].timestamp, requests[-1].timestamp) == (0.0, 20_000.0)
    assert {row.input_length for row in requests} == {3, 4, 5}
    assert {row.output_length for row in requests} == {1, 2}
    assert mixes.rows(mix, 10.0, 20.0, 1) == requests != mixes.rows(mix, 10.0, 20.0, 2)


def test_a_refused_request_has_not_kept_its_targets(mixes):
    targets = mixes.Targets(500.0, 50.0)
    records = [record(0, 0.4), record(1, 0.6), record(2, 0.4, tpot=0.06), record(3, None)]
    assert mixes.share_kept(compute_metrics(records, 4.0, targets.limits_ms)) == 0.25
    assert targets.flags == ("--ttft-target", "500ms", "--tpot-target", "50ms")


def test_recovery_is_counted_from_the_fall_to_the_first_fast_request(load):
    overload = load("overload")
    records = [record(9, 0.1), record(11, 3.0), record(12, None), record(13, 0.2), record(14, 0.1)]
    assert overload.recovery_s(records, fall_s=10.0, fast_s=0.25) == 3.0
    assert overload.recovery_s(records, fall_s=10.0, fast_s=0.05) is None


def test_after_the_overload_comes_one_request_a_second(load, mixes):
    rows = load("overload").overload_rows(mixes.Mix("short", (2, 4), (1, 3)), 5.0, 10.0, seed=0)
    calm = rows[51:]
    assert [row.timestamp for row in calm[:3]] == [11_000.0, 12_000.0, 13_000.0]
    assert {(row.input_length, row.output_length) for row in calm} == {(3, 2)}


def test_the_error_is_that_of_the_steps_in_between(load):
    names = StepTotals.__struct_fields__
    cost = {"base_s": 0.5, "per_prompt_token_s": 0.25, "per_product_s": 0.0, "per_decode_s": 0.0, "per_context_s": 0.0}
    before = dict(zip(names, (10, 100.0, 1000, 0.0, 0, 0), strict=True))
    after = dict(zip(names, (12, 104.0, 1008, 0.0, 0, 0), strict=True))
    # Two steps of 8 tokens together: 2 x 0.5 + 8 x 0.25 = 3 s were predicted, 4 s it took.
    found = load("measure_tuning").relative_error({"step_cost": cost, "steps": before}, {"steps": after})
    assert found == pytest.approx(-0.25)


def test_what_was_measured_is_not_measured_again(load, tmp_path, capsys):
    notebook = load("measure_tuning").Notebook
    first = notebook(tmp_path / "results.jsonl", 1)
    assert first.get("a") is None
    first.add("a", {"goodput": 1.5})
    with pytest.raises(load("measure_tuning").AllForNowError):
        first.get("b")
    assert notebook(tmp_path / "results.jsonl", 0).get("a") == {"goodput": 1.5}
    assert "goodput 1.5" in capsys.readouterr().out
