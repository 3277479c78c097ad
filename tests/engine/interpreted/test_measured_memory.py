"""The pool of a GPU worker follows from what its largest steps took; graphs are captured in one pool, largest first."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import ConfigurationError
from baton.engine.graph_runner import CudaGraphCapture
from baton.engine.memory import BYTES_PER_GRAPH, CUDA_BYTES
from baton.engine.model_runner import ModelRunner
from baton.engine.triton_loading import warm_up

WEIGHTS, PEAK = 7000, 300  # bytes; a step of n tokens takes PEAK * n
BLOCK, WORKSPACE = 16 * 512, 2 * 16 * 2  # bytes a block: 512 of KV a token; twice 4 * 17 * 4 bytes per 256 tokens


class FakeCard:
    """torch.cuda's memory statistics, as if each step took memory in proportion to its tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int):
        self.steps: list[int] = []
        forward = ModelRunner.forward

        def watched(runner: ModelRunner, batch: Any) -> torch.Tensor:
            self.steps.append(batch.num_tokens)
            return forward(runner, batch)

        monkeypatch.setattr(ModelRunner, "forward", watched)
        for name, value in {
            "empty_cache": lambda: None,
            "synchronize": lambda device: None,
            "reset_peak_memory_stats": lambda device: None,
            "memory_reserved": lambda device: WEIGHTS,
            "max_memory_reserved": lambda device: WEIGHTS + PEAK * self.steps[-1],
            "mem_get_info": lambda device: (0, total),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_what_the_steps_leave_becomes_the_pool(tiny_model: Path, load, monkeypatch: pytest.MonkeyPatch) -> None:
    rings, graphs = 5000, 2 * BYTES_PER_GRAPH + PEAK * 2
    room = 10 * (BLOCK + WORKSPACE) + 100
    total = 2 * (CUDA_BYTES + WEIGHTS + PEAK * 7 + graphs + rings + room)
    card = FakeCard(monkeypatch, total)
    engine = load(tiny_model, num_blocks=0, max_batch=2, token_budget=7, device_memory_share=0.5, ring_bytes=rings)
    assert card.steps == [7, 2]  # the token budget, and the largest graph
    assert engine.num_blocks == engine.pool.num_blocks == 10
    assert engine.memory_note.startswith("memory: 50% of 1.3 GiB - CUDA 640 MiB - weights")


def test_a_card_that_is_too_small_is_refused_with_the_sum(
    tiny_model: Path, load, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCard(monkeypatch, 1 << 30)
    with pytest.raises(ConfigurationError, match=r"no room for a KV cache: 50% of 1\.0 GiB - CUDA 640 MiB"):
        load(tiny_model, num_blocks=0, token_budget=3, device_memory_share=0.5)


def test_warming_up_runs_every_kernel_and_keeps_to_block_0(tiny_qwen3: Path, load) -> None:
    engine = load(tiny_qwen3)
    before = [layer.clone() for layer in engine.pool.layers]
    warm_up(engine.runner, engine.sampler, engine.pool)
    assert engine.runner.num_steps == 1
    for layer, old in zip(engine.pool.layers, before, strict=True):
        torch.testing.assert_close(layer[1:], old[1:], rtol=0, atol=0, equal_nan=True)
        assert layer[0, :, :, 0].isfinite().all()


def test_a_real_capture_is_thread_local_in_one_pool_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def graph(graph: Graph, **options: object) -> Iterator[None]:
        log.append(options)
        yield
        log.append("captured")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    capture = CudaGraphCapture(torch.device("cpu"))
    result = torch.ones(1)
    replays = [capture(lambda: result) for _ in range(2)]
    options = {"pool": "pool", "stream": "stream", "capture_error_mode": "thread_local"}
    assert log == [options, "captured"] * 2
    assert replays[0]() is result
    assert log[-1] == "replay"
