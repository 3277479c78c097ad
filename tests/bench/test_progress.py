"""Progress on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from baton.bench.progress import BarProgress, LineProgress, LoadState, progress_for


def test_progress_lines_keep_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.5, 109.9, 110.0, 115.0, 121.0])  # the first is the start
    monkeypatch.setattr("baton.bench.progress.time.monotonic", lambda: next(times))
    out = io.StringIO()
    with LineProgress(out) as progress:
        for _ in range(5):
            progress.show(LoadState(3, 1, 2, 64))
    line = "bench: 3/64 requests, 1 failed, 2 in flight\n"
    assert out.getvalue() == line * 2


def test_the_bar_draws_only_when_shown_and_leaves_nothing_behind() -> None:
    out = io.StringIO()
    with BarProgress(Console(file=out, force_terminal=True, width=100)) as progress:
        progress.show(LoadState(3, 1, 2, 64))
        drawn = out.getvalue()
        assert "3/64" in drawn
        assert "2 in flight, 1 failed" in drawn
    assert out.getvalue().endswith("\x1b[2K"), "the line is erased at the end"


def test_a_stream_that_is_no_terminal_gets_lines() -> None:
    assert isinstance(progress_for(io.StringIO()), LineProgress)
