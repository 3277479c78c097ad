"""`baton bench kernels` on the command line: beside `baton bench URL`, and refusals before anything is measured."""

import json

import pytest

from baton.engine.measuring.bench import SHAPES
from baton.engine.measuring.limits import DeviceLimits
from baton.engine.measuring.timing import HostTimer
from baton.kernels.gpu.model_shapes import ModelShape
from baton.launch.cli import main

TINY = ModelShape("tiny", 16, 32, 2, 3, 1, 8, 101, qk_norm=False)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    return int(stopped.value.code or 0)


def test_it_prints_a_table_and_writes_json(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SHAPES, "smollm2-135m", TINY)
    monkeypatch.setattr("baton.engine.measuring.bench._BUDGET_S", 0.0)
    monkeypatch.setattr("baton.engine.measuring.bench.timer_for", lambda _: HostTimer(0, 0.0))
    limits = DeviceLimits(1e9, {"float16": 1e12, "float32": 1e12})
    monkeypatch.setattr("baton.engine.measuring.bench.measure_limits", lambda *_: limits)
    assert run("kernels", "--device", "cpu", "--model", "smollm2-135m", "--json", str(tmp_path / "k.json")) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("decode attention") and "memory" in line for line in printed)
    assert max(map(len, printed)) <= 120
    content = json.loads((tmp_path / "k.json").read_text())
    assert content["model"] == "tiny"
    assert all(row["timing"]["num_rounds"] >= 5 for row in content["measurements"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--device", "tpu"), "'tpu'"),
        (("--device", "cpu", "--model", "gpt-5"), "llama-3.1-8b"),
        (("--device", "cpu", "--json", "/nowhere/k.json"), "/nowhere"),
    ],
)
def test_what_cannot_be_is_refused_at_once(arguments, word, capsys):
    assert run("kernels", *arguments) == 2
    assert word in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run("kernels", "--device", "cuda") == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_load_on_a_server_is_still_what_bench_does(capsys):
    assert run("http://127.0.0.1:9", "--num-requests", "1") == 2
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
