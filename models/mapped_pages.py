"""Giving back pages of a mapped file: the next access reads them again from the system's cache."""

import ctypes
import mmap
import sys
from pathlib import Path

_MADV_DONTNEED = 4  # Linux; the word means other things elsewhere


def mapped_ranges(path: Path) -> list[range]:
    """Where this process has mapped the file `path`; none on systems that do not tell."""
    maps = Path("/proc/self/maps")
    if sys.platform != "linux" or not maps.exists():
        return []
    name = str(path.resolve())
    found = [line.split(maxsplit=5) for line in maps.read_text(errors="replace").splitlines()]
    bounds = [entry[0].split("-") for entry in found if len(entry) == 6 and entry[5] == name]
    return [range(int(first, 16), int(last, 16)) for first, last in bounds]


def drop_pages(address: int, size: int) -> None:
    """Advise Linux that the whole pages within `size` bytes from `address` are not needed now.

    They must be of a mapped file (`mapped_ranges`) and not written to: other memory would be lost.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)
