"""Families with windows, experts and two rotary bases through a whole server: the oracle's tokens, cold and warm."""

import random
import shutil
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GAP = 2e-3
NEW_TOKENS = 12
FEATURES = ("mistral window", "mixtral window", "gemma3")
LENGTH = 90  # of a prompt: longer than the windows
CHANGED = (0, 61, 33, 5)  # tokens at the end of each prompt that are its own: more and fewer than the windows


def check(output: list[int], expected: list[int], gaps: list[float], where: str) -> None:
    differing = [i for i, pair in enumerate(zip(output, expected, strict=True)) if pair[0] != pair[1]]
    assert not differing or gaps[differing[0]] < GAP, f"{where}: differs at {differing}"


@pytest.mark.parametrize("feature", FEATURES)
def test_same_tokens_cold_and_warm(feature, random_models, save_model, tiny_model: Path, serve) -> None:
    family, settings = random_models.FEATURES[feature]
    folder = save_model(family, **{**settings, "vocab_size": 320})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, folder / name)
    rng = random.Random(1)
    first = [rng.randrange(3, 320) for _ in range(LENGTH)]
    prompts = [first[: LENGTH - changed] + first[LENGTH - changed :][::-1] for changed in CHANGED]
    expected = [random_models.greedy(folder, prompt, NEW_TOKENS) for prompt in prompts]
    flags = ("--prefill", "1", "--decode", "1", "--dtype", "float32", "--block-size", "8", "--local-prefill", "never")
    with serve(folder, *flags) as server:
        for cache in ("cold", "warm"):  # the first round reuses prefixes too: prompts begin alike
            for prompt, (tokens, gaps) in zip(prompts, expected, strict=True):
                output = server.token_ids(prompt, NEW_TOKENS)
                check(output, tokens, gaps, f"{feature}, {cache}, prompt {prompts.index(prompt)}")
        server.require_handed_over()
