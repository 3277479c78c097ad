"""The run directory: private, alone, gone afterwards; those of dead launchers are removed, those of living ones not."""

import stat
import subprocess
import sys

import pytest

from baton.core.errors import ConfigurationError
from baton.launch import run_dir
from baton.launch.run_dir import choose_base, remove_stale, run_directory


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir, "candidate_bases", lambda: [tmp_path])
    monkeypatch.setattr(run_dir, "MAX_SOCKET_PATH", 500)  # pytest's folders are deep
    return tmp_path


def test_it_is_private_and_goes_away(base):
    with run_directory(0) as path:
        assert path.parent == base
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "ring").write_bytes(b"x")
    assert list(base.iterdir()) == []


def test_it_goes_away_after_an_error(base):
    with pytest.raises(RuntimeError), run_directory(0):
        raise RuntimeError
    assert list(base.iterdir()) == []


def test_a_living_launcher_keeps_its_directory(base):
    with run_directory(0) as first, run_directory(0) as second:
        assert first != second
        assert first.exists()
        assert remove_stale(base) == []


def test_the_directory_of_a_killed_launcher_is_removed_by_the_next(base):
    code = (
        "import os, sys; from pathlib import Path; from baton.launch import run_dir\n"
        f"run_dir.candidate_bases = lambda: [Path({str(base)!r})]; run_dir.MAX_SOCKET_PATH = 500\n"
        "with run_dir.run_directory(0) as path: print(path); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-P", "-u", "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    stale = killed.stdout.strip()
    assert killed.returncode == -9
    assert [str(path) for path in base.iterdir()] == [stale]
    with run_directory(0) as path:
        assert list(base.iterdir()) == [path]
        assert str(path) != stale


def test_other_folders_are_left_alone(base):
    (base / "baton-notes").mkdir()  # no lock file: not a run directory
    (base / "baton-file").write_text("")
    (base / "other").mkdir()
    (base / "baton-link").symlink_to(base / "other")
    assert remove_stale(base) == []
    assert len(list(base.iterdir())) == 4


def test_the_first_base_with_room_and_a_short_path_is_taken(tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    short = run_dir.Path("/tmp")
    assert choose_base(0, [deep, short]) == short
    with pytest.raises(ConfigurationError, match=r"no place for .* MiB of shared memory .*--transport tcp"):
        choose_base(1 << 60, [short])
