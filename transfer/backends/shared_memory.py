"""Pieces in a file both workers map: num_slots x slot_bytes in the run's 0700 directory, one writer, one reader.

The receiver makes the file, all of it allocated at once: a directory that is too small is an error here, not a SIGBUS
under load. Its name goes once the sender is known to have it mapped, so a killed worker leaves no file behind.
"""

import mmap
import os
import re
import secrets
import stat
from pathlib import Path

from ...core.errors import ConfigurationError, RemoteProtocolError
from .ring_backend import ReceiverBackend, SenderBackend

_NAME = re.compile(r"[0-9a-f]{32}")


class SharedMemorySender(SenderBackend):
    """Maps the file a peer offered. Raises RemoteProtocolError when the offer is not a private file of that size."""

    transport = "shared_memory"

    def __init__(self, run_dir: str, name: str, num_slots: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._memory = memoryview(_attach(run_dir, name, num_slots * slot_bytes))

    def write(self, slot: int, num_bytes: int) -> memoryview:
        start = slot * self._slot_bytes
        return self._memory[start : start + num_bytes]

    def close(self) -> None:
        self._memory.release()  # the mapping itself goes with the last view of it


class SharedMemoryReceiver(ReceiverBackend):
    """Raises ConfigurationError when the directory has no room for the ring."""

    transport = "shared_memory"

    def __init__(self, run_dir: str, num_slots: int, slot_bytes: int) -> None:
        self.name = secrets.token_hex(16)
        self._path = Path(run_dir) / f"{self.name}.ring"
        self._slot_bytes = slot_bytes
        self._memory = memoryview(_create(self._path, num_slots * slot_bytes))
        self._copy = memoryview(bytearray(slot_bytes))
        self._is_attached = False

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes + self._copy.nbytes

    def read(self, slot: int, num_bytes: int, payload: memoryview | None) -> memoryview:
        if not self._is_attached:  # a piece came in, so its sender has the file mapped
            self._path.unlink(missing_ok=True)
            self._is_attached = True
        start = slot * self._slot_bytes
        copy = self._copy[:num_bytes]
        copy[:] = self._memory[start : start + num_bytes]
        return copy

    def close(self) -> None:
        self._memory.release()
        if not self._is_attached:
            self._path.unlink(missing_ok=True)


def _create(path: Path, num_bytes: int) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigurationError(
            f"{path.parent} has no room for a staging ring of {num_bytes / 2**20:.0f} MiB ({error.strerror}); free "
            "space there (for containers: a larger /dev/shm), or use --transport tcp"
        ) from error


def _attach(run_dir: str, name: str, num_bytes: int) -> mmap.mmap:
    if not run_dir or _NAME.fullmatch(name) is None:
        raise RemoteProtocolError("the offered ring has no name this process can look up in its run directory")
    try:
        descriptor = os.open(Path(run_dir) / f"{name}.ring", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            private = stat.S_ISREG(status.st_mode) and status.st_mode & 0o077 == 0 and status.st_uid == os.geteuid()
            if not private or status.st_size != num_bytes:
                raise RemoteProtocolError(f"the offered ring {name} is not a private file of {num_bytes} bytes")
            return mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RemoteProtocolError(f"the offered ring {name} cannot be mapped: {error.strerror}") from error
