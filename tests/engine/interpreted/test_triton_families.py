"""The Triton kernels compute every kind of layer: windows, soft caps, GeGLU, experts, partial rotation, two bases."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.core.errors import ConfigurationError
from baton.engine.engine import Engine
from baton.vocab.model_config import FAMILIES

# Few layers of each: a layer takes about half a second here.
SETTINGS = {
    "mistral": {"num_hidden_layers": 1, "sliding_window": 11},
    "mixtral": {"num_hidden_layers": 1, "num_local_experts": 4},
    "qwen3_moe": {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
    "gemma2": {"num_hidden_layers": 2, "sliding_window": 9, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"num_hidden_layers": 2, "sliding_window": 9, "query_pre_attn_scalar": 24},
    "phi3": {"num_hidden_layers": 1, "pad_token_id": 0, "rope_parameters": {"partial_rotary_factor": 0.75}},
}
SETTINGS["qwen3_moe"]["moe_intermediate_size"] = 24
SETTINGS["gemma3_text"]["layer_types"] = ["sliding_attention", "full_attention"]
SETTINGS["phi3"]["rope_parameters"] |= {"rope_type": "default", "rope_theta": 10000.0}  # type: ignore[operator]


def test_no_family_is_left_out() -> None:
    assert {*SETTINGS} | {"llama", "qwen2", "qwen3"} == {*FAMILIES}  # those: test_triton_engine.py


@pytest.mark.parametrize("family", SETTINGS)
def test_hidden_states_and_logits_equal_the_cpu_path(
    family: str, save_model: Callable[..., Path], load: Callable[..., Engine], requests, run
) -> None:
    """A prompt in two chunks, of which the second begins behind a window, then a decode beside another prompt."""
    folder = save_model(family, vocab_size=320, **SETTINGS[family])
    results = []
    for engine in (load(folder), load(folder, kernels="torch")):
        a, b = requests([29, 5])
        first = run(engine, a.chunk(18))
        second = run(engine, a.chunk(11), b.chunk(5))
        third = run(engine, a.decode(7), b.decode(9))
        hidden = torch.cat((first, second, third))
        results.append((hidden, engine.runner.logits(hidden)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_heads_that_no_tile_holds_are_refused_by_name(save_model: Callable[..., Path], load) -> None:
    folder = save_model("llama", head_dim=12)
    load(folder, kernels="torch")
    with pytest.raises(ConfigurationError, match="head_dim is 12; the Triton kernels"):
        load(folder)


def test_int8_experts_are_refused_by_name(save_model: Callable[..., Path], load) -> None:
    folder = save_model("mixtral", num_local_experts=2)
    with pytest.raises(ConfigurationError, match="dtype 'int8' is not supported for the experts of 'mixtral'"):
        load(folder, dtype="int8")
