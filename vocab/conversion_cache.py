"""The cache of converted models: each one complete or absent, whatever is killed when.

<cache>/models/<key>/            a complete model folder, never changed afterwards
<cache>/models/.partial-<key>/   being made by the holder of the lock; without a holder it is rubbish
<cache>/locks/<key>.lock         held while <key> is made, so two processes starting at once convert once
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import ConfigurationError
from .progress import Progress

_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/baton`, or `~/.cache/baton`. A relative XDG_CACHE_HOME is ignored, as its standard says."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "baton"


def cached_folder(cache: Path, key: str) -> Path | None:
    """The complete folder `key`, or None when it has to be built."""
    folder = cache / "models" / key
    return folder if folder.is_dir() else None


def build_once(cache: Path, key: str, build: Callable[[Path], None], progress: Progress) -> Path:
    """The folder `key`, built by `build(empty folder)` unless it exists; a failed build leaves nothing behind.

    Raises ConfigurationError when the cache cannot be written (no space, no permission), besides what `build` raises.
    """
    with storage_errors(cache), _locked(cache / "locks" / f"{key}.lock", progress):
        return cached_folder(cache, key) or _build(cache / "models", key, build)


@contextmanager
def storage_errors(cache: Path) -> Iterator[None]:
    """Turns no space and no permission into a ConfigurationError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            raise
        raise ConfigurationError(
            f"Cannot write the model to the cache {cache}: {error.strerror}. "
            "Free some space, or set XDG_CACHE_HOME to a folder that has it and can be written."
        ) from error


def _build(models: Path, key: str, build: Callable[[Path], None]) -> Path:
    partial = models / f".partial-{key}"
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left: we hold the lock, so nobody uses it
    partial.mkdir(parents=True)
    try:
        build(partial)
        for path in partial.iterdir():
            _flush_to_disk(path)  # or a power cut could leave the final name with empty files
        return partial.rename(models / key)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:  # the lock goes with the descriptor, so also when this process is killed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with progress.phase("Waiting for another process that prepares this model"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
