"""The run directory: sockets, rings and keys of one launcher, mode 0700, gone when it ends.

Whose directory is still in use is decided by a lock that the kernel drops with its owner, not by a pid: the launcher
holds `lock` in it. Directories of dead launchers are removed by the next start.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import ConfigurationError
from ..transfer.channels import MAX_SOCKET_PATH

PREFIX = "baton-"
_LOCK = "lock"
_NEW_PREFIX = ".new-"  # not yet locked: no other start may take it for a dead one
_LONGEST_SOCKET_NAME = 48


@contextmanager
def run_directory(ring_bytes: int) -> Iterator[Path]:
    """A fresh directory with room for `ring_bytes` of shared memory; removed at the end of the block."""
    base = choose_base(ring_bytes, candidate_bases())
    remove_stale(base)
    draft = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX, dir=base))
    lock = os.open(draft / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = draft.rename(base / f"{PREFIX}{secrets.token_hex(4)}")
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)  # a child killed in this moment may still be writing
    finally:
        os.close(lock)


def candidate_bases() -> list[Path]:
    """Memory-backed first: the rings are files in the run directory."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    bases = [Path("/dev/shm"), *([Path(runtime_dir)] if runtime_dir else []), Path(tempfile.gettempdir()), Path("/tmp")]
    return [base for base in bases if base.is_dir() and os.access(base, os.W_OK | os.X_OK)]


def choose_base(ring_bytes: int, bases: list[Path]) -> Path:
    """The first base with room and a path short enough for sockets. Raises ConfigurationError when there is none."""
    for base in bases:
        fits = len(os.fsencode(base)) + 1 + len(PREFIX) + 8 + 1 + _LONGEST_SOCKET_NAME <= MAX_SOCKET_PATH
        if fits and shutil.disk_usage(base).free >= ring_bytes:
            return base
    tried = ", ".join(map(str, bases)) or "/dev/shm, $XDG_RUNTIME_DIR, the temporary directory"
    raise ConfigurationError(
        f"there is no place for {ring_bytes >> 20} MiB of shared memory (tried {tried}). "
        "Free some space there (a container: --shm-size=1g), or use --transport tcp."
    )


def remove_stale(base: Path) -> list[Path]:
    """Remove our run directories whose launcher is dead; return them."""
    removed = []
    for path in base.glob(f"{PREFIX}*"):
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
            continue
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # not a run directory, or gone in this moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its launcher lives
        else:
            shutil.rmtree(path, ignore_errors=True)  # another start may be removing it too
            removed.append(path)
        finally:
            os.close(lock)
    return removed
