"""What keeps the peak of loading near what is kept: read pages and freed copies go back to the system at once."""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MADV_DONTNEED = 4  # Linux; the word means other things elsewhere

# Of glibc's mallopt. Once set, the threshold no longer adapts; afterwards it is where adapting would end.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_FROM, _LARGEST_ADAPTED = 256 << 10, 32 << 20


@contextmanager
def freed_memory_is_returned() -> Iterator[None]:
    """Within, glibc maps every large piece of memory by itself and unmaps it when it is freed.

    Left alone it would keep freed copies of weights, which differ in size, between packed ones (measured: half as much
    again as the model). Outside it must not: a step would ask the system for fresh pages all the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ADAPTED)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_ADAPTED)


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

    The next access reads them again from the system's cache. They must be of a mapped file (`mapped_ranges`) and not
    written to: other memory would be lost.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)
