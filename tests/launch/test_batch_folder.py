"""`--batch-dir`: the same folder for each start with one model and port, and for no other."""

from pathlib import Path

import pytest

from baton.launch.batch_folder import batch_folder
from baton.launch.topology import GatewayOptions


def test_auto_is_below_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert batch_folder("auto", "org/a model", 8000) == f"{tmp_path}/baton/batches/org-a-model-8000"
    others = {batch_folder("auto", model, port) for model in ("a", "b") for port in (1, 2)}
    assert len(others) == 4
    assert Path(batch_folder("auto", "../../x", 1)).parent == tmp_path / "baton" / "batches"
    assert not any(tmp_path.iterdir())


def test_a_folder_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert batch_folder("kept", "m", 1) == f"{tmp_path}/kept"
    assert batch_folder("~/kept", "m", 1) == "/home/me/kept"
    assert batch_folder("none", "m", 1) == GatewayOptions().batch_dir == ""
