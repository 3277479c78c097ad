"""Saying what takes long: one line per phase, and on a terminal a bar that goes away when the phase ends."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

Advance = Callable[[int], None]  # adds an amount to the phase; the unit is the one of its total


class Progress(Protocol):
    """Where long work reports: `with progress.phase("Converting", total=272) as advance: ... advance(1)`."""

    def phase(self, description: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """Announce a phase; it ends with the block. `total` None means that its end cannot be foreseen."""
        ...


class LineProgress:
    """One line per phase and nothing else: for logs, files and pipes."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    @contextmanager
    def phase(self, description: str, total: int | None = None) -> Iterator[Advance]:
        print(description, file=self._stream, flush=True)
        yield lambda amount: None


class BarProgress:
    """One line per phase, with a bar below it while the phase runs: for terminals."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    @contextmanager
    def phase(self, description: str, total: int | None = None) -> Iterator[Advance]:
        from rich.console import Console  # 0.1 s that a start with a warm cache does not pay
        from rich.progress import BarColumn, TaskProgressColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        print(description, file=self._stream, flush=True)
        columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with RichProgress(*columns, console=Console(file=self._stream), transient=True) as bar:
            task = bar.add_task(description, total=total)
            yield lambda amount: bar.advance(task, amount)


def default_progress(stream: TextIO | None = None) -> Progress:
    """Bars when `stream` (stderr by default) is a terminal, lines otherwise."""
    stream = sys.stderr if stream is None else stream
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)
