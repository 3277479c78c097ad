"""`baton bench gateway` on the command line, with a tiny model and few tokens: it runs, and compares every text."""

import json
from pathlib import Path

import pytest

from baton.launch.bench_gateway import CONTENDERS
from baton.launch.cli import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "gateway", *arguments])
    return int(stopped.value.code or 0)


@pytest.mark.slow
def test_it_measures_compares_and_writes_json(tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    few = ("--num-streams", "3", "--input-len", "5", "--output-len", "20", "--num-runs", "2")
    status = run(str(tiny_model), *few, "--json", str(tmp_path / "out.json"))
    printed = capfd.readouterr().out
    assert status == 0, printed
    assert "3 streams, 5 tokens in, 20 out" in printed
    assert "of the floor" in printed
    rates = json.loads((tmp_path / "out.json").read_text())["chunks_per_s"]
    assert {name: len(values) for name, values in rates.items()} == {c.name: 2 for c in CONTENDERS}
    assert all(rate > 0 for values in rates.values() for rate in values)


@pytest.mark.parametrize(("option", "word"), [("--num-streams", "num-streams"), ("--output-len", "output-len")])
def test_nonsense_is_refused_at_once(option: str, word: str, capsys: pytest.CaptureFixture[str]):
    assert run(option, "0") == 2
    assert word in capsys.readouterr().err
