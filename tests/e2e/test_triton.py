"""The Triton kernels inside real servers, under the interpreter: slowly, but every line on the way of a token.

This is the overlapped loop as well: the workers launch a step before they have collected the one in front of it.
"""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = Path(__file__).resolve().parent.parent / "data"
NUM_PROMPTS, NUM_TOKENS = 3, 8
FLAGS = ("--kernels", "triton", "--dtype", "float32", "--local-prefill", "never")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server inherits it; this process has not imported triton."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("num_prefill", [0, 1], ids=["colocated", "1P1D"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_oracles_tokens(family, num_prefill, tiny_model, tiny_qwen3, serve, make_oracle) -> None:
    folder = tiny_model if family == "llama" else tiny_qwen3
    stored = json.loads((DATA / "oracle_tiny.json").read_text())
    prompts = sorted((row["prompt"] for row in stored), key=len)[1 : 1 + NUM_PROMPTS]
    expected = [row["output"] for row in make_oracle.greedy(folder, prompts, NUM_TOKENS)]
    with serve(folder, "--prefill", str(num_prefill), *FLAGS) as server:
        for cache in ("cold", "warm"):
            assert server.all_token_ids(prompts, NUM_TOKENS, at_once=NUM_PROMPTS) == expected, cache
        if num_prefill:
            server.require_handed_over()
