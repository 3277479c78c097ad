"""Greedy generation equals the stored tokens of transformers (tests/data, made by scripts/make_oracle.py)."""

from pathlib import Path

import msgspec
import pytest

from baton.core.config import EngineConfig
from baton.core.request import SamplingParams
from baton.engine.engine import Engine, load_engine
from baton.engine.forward_batch import Chunk, build_forward_batch
from baton.engine.sampler import SamplingRow
from baton.vocab.progress import default_progress
from baton.vocab.source import default_cache_dir, resolve_model

DATA = Path(__file__).parents[1] / "data"
NEAR_TIE = 2e-3  # where the oracle's two best logits are closer than this, rounding may decide


class Case(msgspec.Struct):
    prompt: list[int]
    output: list[int]
    gaps: list[float]  # of the oracle's two best logits, per output token


def read_cases(name: str) -> list[Case]:
    return msgspec.json.decode((DATA / name).read_bytes(), type=list[Case])


def load(folder: Path, cases: list[Case]) -> Engine:
    tokens = sum(len(case.prompt) + len(case.output) + 16 for case in cases)
    return load_engine(
        EngineConfig(str(folder), "cpu", "torch", "float32", block_size=16, num_blocks=tokens // 16, threads=1)
    )


def generate_all(engine: Engine, cases: list[Case]) -> list[list[int]]:
    """All prompts one after the other, then all sequences in one batch, step by step."""
    size = engine.layout.block_size
    free = list(range(engine.pool.num_blocks))
    tables = [[free.pop() for _ in range(-(-(len(c.prompt) + len(c.output)) // size))] for c in cases]
    outputs: list[list[int]] = [[] for _ in cases]

    def step(which: list[int]) -> None:
        chunks, rows = [], []
        for i in which:
            done = len(cases[i].prompt) + len(outputs[i])
            new = outputs[i][-1:] or cases[i].prompt
            chunks.append(Chunk(new, done - len(new), tables[i], wants_hidden=True))
            rows.append(SamplingRow(SamplingParams(temperature=0.0), 0, done))
        hidden = engine.runner.forward(build_forward_batch(chunks, size))
        for i, token in zip(which, engine.sampler.launch(engine.runner.logits(hidden), rows).token_ids(), strict=True):
            outputs[i].append(token)

    for i in range(len(cases)):
        step([i])
    for _ in range(len(cases[0].output) - 1):
        step(list(range(len(cases))))
    return outputs


def check(cases: list[Case], outputs: list[list[int]]) -> None:
    near_ties = 0
    for number, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        first = next((i for i, pair in enumerate(zip(output, case.output, strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            print(f"sequence {number} differs first at {first}, where the gap is {case.gaps[first]}")
            assert case.gaps[first] < NEAR_TIE
            near_ties += 1
    assert near_ties <= len(cases) * 0.05


def test_tiny_model(tiny_model: Path) -> None:
    cases = read_cases("oracle_tiny.json")
    check(cases, generate_all(load(tiny_model, cases), cases))


@pytest.mark.slow
def test_smollm2() -> None:
    cases = read_cases("oracle_smollm2.json")
    folder = resolve_model(None, default_cache_dir(), default_progress()).folder
    check(cases, generate_all(load(folder, cases), cases))
