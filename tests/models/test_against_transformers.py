"""Every family and every feature of the config gives transformers' logits on the same weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.kernels.cpu import CpuKernels, plan_attention
from baton.models.registry import Model, load_model
from baton.vocab.model_config import ModelConfig, load_model_config

TOKEN_IDS = torch.randint(0, 99, (120,), generator=torch.Generator().manual_seed(3)).tolist()
BLOCK_SIZE = 8

FEATURES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama without grouped heads": ("llama", {"num_key_value_heads": 6}),
    "llama other theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama other eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama 3.1 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def logits_of(model: Model, config: ModelConfig, token_ids: list[int]) -> torch.Tensor:
    """All logits of one prompt, computed in one pass over an empty cache."""
    count = len(token_ids)
    num_blocks = -(-count // BLOCK_SIZE)
    cache = torch.full((num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim), torch.nan)
    layers = [cache[:, i] for i in range(config.num_layers)]
    positions = torch.arange(count)
    plan = plan_attention(layers[0], positions, [0, count], [count], [torch.arange(num_blocks)])
    return model.logits(model.forward(torch.tensor(token_ids), positions, plan, layers, positions))


@pytest.mark.parametrize("feature", FEATURES)
def test_logits_equal_transformers(
    feature: str,
    save_model: Callable[..., Path],
    oracle_logits: Callable[[Path, list[int]], torch.Tensor],
) -> None:
    family, settings = FEATURES[feature]
    folder = save_model(family, **settings)
    config = load_model_config(folder)
    expected = oracle_logits(folder, TOKEN_IDS)
    actual = logits_of(load_model(config, folder, CpuKernels(), "float32"), config, TOKEN_IDS)
    assert expected.std() > 0.5
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
