"""How far a load has come, on stderr: a bar on a terminal, else a line now and then. stdout is for the result."""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_INTERVAL_S = 10.0


@dataclass(frozen=True)
class LoadState:
    """How many requests are done (`failed` of them badly), in flight and asked in all."""

    done: int
    failed: int
    in_flight: int
    total: int


class LoadProgress(Protocol):
    """Shows LoadStates between enter and exit."""

    def __enter__(self) -> Self: ...

    def show(self, state: LoadState) -> None:
        """Called about twice a second; must be cheap, since the load generator waits for it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LineProgress:
    """A line every `interval_s` seconds, for logs."""

    def __init__(self, stream: TextIO, interval_s: float = LINE_INTERVAL_S) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._next = 0.0

    def __enter__(self) -> Self:
        self._next = time.monotonic() + self._interval_s
        return self

    def show(self, state: LoadState) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._interval_s
        print(
            f"bench: {state.done}/{state.total} requests, {state.failed} failed, {state.in_flight} in flight",
            file=self._stream,
            flush=True,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class BarProgress:
    """A progress bar that is redrawn only by `show`: a redraw thread would take time from the load generator."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("requests", total=None, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def show(self, state: LoadState) -> None:
        note = f"{state.in_flight} in flight" + (f", {state.failed} failed" if state.failed else "")
        self._progress.update(self._task, total=state.total, completed=state.done, note=note, refresh=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def progress_for(stream: TextIO) -> LoadProgress:
    """The bar when `stream` is a terminal, else lines."""
    if stream.isatty():
        return BarProgress(Console(file=stream))
    return LineProgress(stream)
