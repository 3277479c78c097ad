import io

from baton.vocab.progress import BarProgress, LineProgress, default_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_one_line_per_phase() -> None:
    stream = io.StringIO()
    progress = default_progress(stream)
    assert isinstance(progress, LineProgress)
    with progress.phase("Reading"):
        pass
    with progress.phase("Converting", total=10) as advance:
        advance(4)
        advance(6)
    assert stream.getvalue() == "Reading\nConverting\n"


def test_a_terminal_gets_the_line_and_a_bar() -> None:
    stream = Terminal()
    progress = default_progress(stream)
    assert isinstance(progress, BarProgress)
    with progress.phase("Converting", total=10) as advance:
        advance(10)
    assert stream.getvalue().startswith("Converting\n")
    assert "100%" in stream.getvalue()
