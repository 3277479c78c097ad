"""Engines of the Triton kernels under the interpreter, and the CPU engine they are held against.

A forward pass of two layers takes about a second here, so batches are few and small.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from baton.core.config import EngineConfig
from baton.engine.engine import Engine, load_engine
from baton.engine.forward_batch import Chunk, build_forward_batch

LoadEngine = Callable[..., Engine]


def config(folder: Path, **changes: object) -> EngineConfig:
    settings = {
        "device": "cpu",
        "kernels": "triton",
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 40,
        "threads": 1,
    }
    return EngineConfig(model_folder=str(folder), **{**settings, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def load() -> LoadEngine:
    """`load(folder, **changes)`: an engine whose pool is poisoned with NaN."""

    def load(folder: Path, **changes: object) -> Engine:
        engine = load_engine(config(folder, **changes))
        for layer in engine.pool.layers:
            layer.fill_(torch.nan)
        return engine

    return load


class Request:
    """A sequence at scattered blocks, computed step by step; two engines can run the same one."""

    def __init__(self, token_ids: Sequence[int], table: Sequence[int]):
        self.token_ids, self.start, self.table = list(token_ids), 0, list(table)

    def chunk(self, count: int, wants_hidden: bool = True, **flags: object) -> Chunk:
        start, self.start = self.start, self.start + count
        return Chunk(self.token_ids[start : self.start], start, self.table, wants_hidden, **flags)  # type: ignore[arg-type]

    def decode(self, token_id: int, **flags: object) -> Chunk:
        """The next token, sampled by whoever: computed alone."""
        self.token_ids.append(token_id)
        return self.chunk(1, is_decode=True, **flags)


@pytest.fixture
def requests() -> Callable[[Sequence[int]], list[Request]]:
    """`requests(lengths)`: prompts of these lengths, with room for 16 more tokens each, at blocks in random order."""

    def make(lengths: Sequence[int], seed: int = 0) -> list[Request]:
        rng = random.Random(seed)
        free = rng.sample(range(40), 40)
        prompts = [[rng.randrange(320) for _ in range(length)] for length in lengths]
        return [Request(p, [free.pop() for _ in range(-(-(len(p) + 16) // 16))]) for p in prompts]

    return make


@pytest.fixture(scope="session")
def run() -> Callable[..., torch.Tensor]:
    def run(engine: Engine, *chunks: Chunk) -> torch.Tensor:
        return engine.runner.forward(build_forward_batch(list(chunks), engine.layout.block_size))

    return run
