"""The timer of a GPU, on a torch.cuda that is played: what is captured, replayed and divided by what."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from baton.engine.measuring.timing import CudaTimer, time_runs


class PlayedCuda:
    """A device on which each run takes `RUN_S` seconds; a graph repeats what ran while it was captured."""

    RUN_S = 0.0005

    def __init__(self) -> None:
        self.now = 0.0
        self.captured: list[str] | None = None
        self.replays = 0

    def run(self) -> None:
        if self.captured is None:
            self.now += self.RUN_S
        else:
            self.captured.append("run")

    def event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(at=-1.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3
        return event

    def graph(self) -> SimpleNamespace:
        graph = SimpleNamespace(steps=[])

        def replay() -> None:
            self.replays += 1
            self.now += self.RUN_S * len(graph.steps)

        graph.replay = replay
        return graph

    @contextlib.contextmanager
    def capture(self, graph: SimpleNamespace, stream: object):
        self.captured = graph.steps
        yield
        self.captured = None


@pytest.fixture
def cuda(monkeypatch) -> PlayedCuda:
    played = PlayedCuda()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=50 << 20),
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda one: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "Event": played.event,
        "CUDAGraph": played.graph,
        "graph": played.capture,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return played


def test_a_round_is_one_replay_of_all_runs_some_times(cuda):
    timer = CudaTimer(torch.device("cuda"), round_s=0.004)
    assert timer.cold_bytes == 200 << 20
    timing = time_runs(timer, [cuda.run, cuda.run], budget_s=0.0)
    assert timing.median == pytest.approx(PlayedCuda.RUN_S)
    assert cuda.replays == 1 + 5, "one to warm up, then the rounds"


def test_a_graph_is_as_long_as_a_round_and_not_longer(cuda):
    measured = CudaTimer(torch.device("cuda"), round_s=0.004).prepare([cuda.run] * 2)
    before = cuda.now
    assert measured() == pytest.approx(PlayedCuda.RUN_S)
    assert cuda.now - before == pytest.approx(0.004), "four times two runs"
    measured = CudaTimer(torch.device("cuda"), round_s=10.0).prepare([cuda.run] * 4)
    before = cuda.now
    measured()
    assert cuda.now - before == pytest.approx(512 * PlayedCuda.RUN_S), "the limit of launches"
