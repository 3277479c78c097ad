"""Every family and every feature of the config gives transformers' logits on the same weights."""

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from baton.kernels.cpu import CpuKernels, plan_attention
from baton.models.registry import Model, load_model
from baton.vocab.model_config import ModelConfig, load_model_config

FEATURES = runpy.run_path(str(Path(__file__).parents[1] / "random_models.py"))["FEATURES"]
TOKEN_IDS = torch.randint(0, 99, (120,), generator=torch.Generator().manual_seed(3)).tolist()
BLOCK_SIZE = 8
CHUNKS = (1, 36, 29, 41)  # then one by one: of odd lengths, longer and shorter than the windows


def logits_of(model: Model, config: ModelConfig, token_ids: list[int], chunks: Sequence[int] = ()) -> torch.Tensor:
    """All logits of one prompt over an empty cache, at blocks in reverse order: in one pass, or in these chunks
    and then token by token."""
    count = len(token_ids)
    num_blocks = -(-count // BLOCK_SIZE)
    cache = torch.full((num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim), torch.nan)
    layers = [cache[:, i] for i in range(config.num_layers)]
    table = torch.arange(num_blocks).flip(0)
    logits, start = [], 0
    for length in (*chunks, *([1] * (count - sum(chunks)) if chunks else [count])):
        positions = torch.arange(start, start + length)
        slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        start += length
        plan = plan_attention(layers[0], slots, [0, length], [start], [table], set(config.windows))
        ids = torch.tensor(token_ids[start - length : start])
        logits.append(model.logits(model.forward(ids, positions, plan, layers, torch.arange(length))))
    return torch.cat(logits)


@pytest.mark.parametrize("feature", FEATURES)
def test_logits_equal_transformers(
    feature: str,
    save_model: Callable[..., Path],
    oracle_logits: Callable[[Path, list[int]], torch.Tensor],
) -> None:
    """In one pass and in pieces, where windows end in the cache; from one file and from shards."""
    family, settings = FEATURES[feature]
    folder = save_model(family, max_shard_size="60KB", **settings)
    assert len(list(folder.glob("*.safetensors"))) > 1
    config = load_model_config(folder)
    expected = oracle_logits(folder, TOKEN_IDS)
    model = load_model(config, folder, CpuKernels(), "float32")
    assert expected.std() > 0.5
    for chunks in ((), CHUNKS):
        actual = logits_of(model, config, TOKEN_IDS, chunks)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_fp16_weights_stay_close(
    save_model: Callable[..., Path], oracle_logits: Callable[[Path, list[int]], torch.Tensor]
) -> None:
    folder = save_model("llama")
    config = load_model_config(folder)
    expected = oracle_logits(folder, TOKEN_IDS)
    actual = logits_of(load_model(config, folder, CpuKernels(), "float16"), config, TOKEN_IDS)
    assert (actual - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_computed_in_fp32(
    dtype: torch.dtype, save_model: Callable[..., Path], oracle_logits: Callable[[Path, list[int]], torch.Tensor]
) -> None:
    folder = save_model("llama", dtype=dtype)
    config = load_model_config(folder)
    actual = logits_of(load_model(config, folder, CpuKernels(), "float32"), config, TOKEN_IDS)
    torch.testing.assert_close(actual, oracle_logits(folder, TOKEN_IDS), rtol=1e-4, atol=1e-4)


def test_only_the_wanted_rows_come_back_in_their_order(save_model: Callable[..., Path]) -> None:
    folder = save_model("llama")
    config = load_model_config(folder)
    model = load_model(config, folder, CpuKernels(), "float32")
    cache = torch.zeros((1, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim))
    layers = [cache[:, i] for i in range(config.num_layers)]
    positions = torch.arange(10)
    plan = plan_attention(layers[0], positions, [0, 10], [10], [torch.tensor([0])])
    ids = torch.tensor(TOKEN_IDS[:10])
    everything = model.forward(ids, positions, plan, layers, positions)
    for rows in ([], [9], [7, 2]):
        some = model.forward(ids, positions, plan, layers, torch.tensor(rows, dtype=torch.int64))
        assert some.shape == (len(rows), config.hidden_size)
        torch.testing.assert_close(some, everything[rows], rtol=1e-5, atol=1e-5)
