import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigurationError
from baton.vocab.conversion_cache import build_once, cached_folder, default_cache_dir


def everything_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".lock"}


def test_built_once_and_found_again(tmp_path: Path, progress: Any) -> None:
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "file").write_text("content")

    assert cached_folder(tmp_path, "key") is None
    folders = {build_once(tmp_path, "key", build, progress) for _ in range(3)} | {cached_folder(tmp_path, "key")}
    assert folders == {tmp_path / "models" / "key"}
    assert len(calls) == 1
    assert everything_below(tmp_path) == {"locks", "models", "models/key", "models/key/file"}


@pytest.mark.parametrize("failure", [RuntimeError("bug"), KeyboardInterrupt(), ConfigurationError("no")])
def test_a_failed_build_leaves_nothing_and_the_next_one_starts_afresh(
    tmp_path: Path, progress: Any, failure: BaseException
) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise failure

    with pytest.raises(type(failure)):
        build_once(tmp_path, "key", fail, progress)
    assert everything_below(tmp_path) == {"locks", "models"}
    folder = build_once(tmp_path, "key", lambda folder: None, progress)
    assert list(folder.iterdir()) == []


def test_what_a_killed_process_left_is_cleared(tmp_path: Path, progress: Any) -> None:
    left = tmp_path / "models" / ".partial-key"
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    assert cached_folder(tmp_path, "key") is None
    folder = build_once(tmp_path, "key", lambda folder: None, progress)
    assert list(folder.iterdir()) == []
    assert not left.exists()


def test_two_that_start_at_once_build_once(tmp_path: Path, progress: Any) -> None:
    building, go_on = threading.Event(), threading.Event()
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        building.set()
        assert go_on.wait(30)

    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(build_once(tmp_path, "key", build, progress))) for _ in range(2)
    ]
    threads[0].start()
    assert building.wait(30)
    waits = threading.Event()

    class Waiting:
        def phase(self, description: str, total: int | None = None) -> Any:
            waits.set()
            return progress.phase(description, total)

    second = threading.Thread(target=lambda: results.append(build_once(tmp_path, "key", build, Waiting())))
    second.start()
    assert waits.wait(30)  # it found the lock held, and says so
    go_on.set()
    for thread in (threads[0], second):
        thread.join(30)
    assert results == [tmp_path / "models" / "key"] * 2
    assert len(calls) == 1
    assert progress.phases == [["Waiting for another process that prepares this model", None, 0]]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_full_or_forbidden_disk_is_explained(tmp_path: Path, progress: Any, number: int) -> None:
    def fail(folder: Path) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(ConfigurationError) as caught:
        build_once(tmp_path, "key", fail, progress)
    assert os.strerror(number) in str(caught.value)
    assert "XDG_CACHE_HOME" in str(caught.value)
    assert everything_below(tmp_path) == {"locks", "models"}


def test_a_cache_that_is_a_file_is_explained(tmp_path: Path, progress: Any) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ConfigurationError, match="XDG_CACHE_HOME"):
        build_once(tmp_path / "cache", "key", lambda folder: None, progress)


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
    assert default_cache_dir() == Path("/var/cache/someone/baton")
    for ignored in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_dir() == Path("/home/someone/.cache/baton")
