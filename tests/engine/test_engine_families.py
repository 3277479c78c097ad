"""Greedy tokens of every kind of layer equal transformers', over a cached prefix that another sequence computed."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from baton.core.config import EngineConfig
from baton.core.request import SamplingParams
from baton.engine.engine import Engine, load_engine
from baton.engine.forward_batch import Chunk, build_forward_batch
from baton.engine.sampler import SamplingRow

FEATURES = [
    "mistral window", "mixtral window", "qwen2 window", "qwen3_moe some layers", "gemma2 small caps", "gemma3",
    "phi3 partial rotation",
]  # fmt: skip
NEAR_TIE = 2e-3
PROMPT = torch.randint(0, 99, (61,), generator=torch.Generator().manual_seed(4)).tolist()
SHARED = 40  # tokens of whole blocks
NEW_TOKENS = 24


def generate(engine: Engine, prompt: list[int], start: int, table: list[int], chunks: tuple[int, ...]) -> list[int]:
    """Tokens 0 to `start` of the prompt are in the cache; the rest is computed in chunks, then token by token."""
    outputs: list[int] = []
    for length in (*chunks, *[1] * (NEW_TOKENS - 1)):
        known = (prompt + outputs)[start : start + length]
        batch = build_forward_batch([Chunk(known, start, table, wants_hidden=True)], engine.layout.block_size)
        hidden = engine.runner.forward(batch)
        start += length
        if start >= len(prompt):
            row = SamplingRow(SamplingParams(temperature=0.0), 0, start)
            outputs += engine.sampler.launch(engine.runner.logits(hidden), [row]).token_ids()
    return outputs


def check(outputs: list[int], expected: list[int], gaps: list[float]) -> None:
    differing = [i for i, pair in enumerate(zip(outputs, expected, strict=True)) if pair[0] != pair[1]]
    assert not differing or gaps[differing[0]] < NEAR_TIE


@pytest.mark.parametrize("feature", FEATURES)
def test_greedy_tokens_cold_and_over_a_cached_prefix(
    feature: str, random_models: ModuleType, save_model: Callable[..., Path]
) -> None:
    family, settings = random_models.FEATURES[feature]
    folder = save_model(family, **settings)
    engine = load_engine(EngineConfig(str(folder), "cpu", "torch", "float32", block_size=8, num_blocks=40, threads=1))
    cold = generate(engine, PROMPT, 0, list(range(11)), (13, 31, 17))
    expected, gaps = random_models.greedy(folder, PROMPT, NEW_TOKENS)
    assert len(set(expected)) > 1
    check(cold, expected, gaps)
    other = PROMPT[:SHARED] + PROMPT[:10:-1]
    table = [0, 1, 2, 3, 4, *range(30, 20, -1)]
    warm = generate(engine, other, SHARED, table, (1, 37, len(other) - SHARED - 38))
    check(warm, *random_models.greedy(folder, other, NEW_TOKENS))
