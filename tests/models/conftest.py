"""Random models as transformers writes them, and transformers' own logits as the oracle."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

SHAPE = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large enough that every part of the model shows in the logits
    "use_cache": False,
}

SaveModel = Callable[..., Path]


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    """`save_model(family, **settings)`: a folder with a random model of `SHAPE` in safetensors."""
    import transformers

    def save(family: str, max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **settings: object) -> Path:
        torch.manual_seed(7)
        config = transformers.AutoConfig.for_model(family, **{**SHAPE, **settings})
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):  # ones and zeros would hide a mistake
                    parameter.uniform_(0.5, 1.5)
        folder = tmp_path_factory.mktemp(family)
        model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return save


@pytest.fixture(scope="session")
def oracle_logits() -> Callable[[Path, list[int]], torch.Tensor]:
    """`oracle_logits(folder, token_ids)`: transformers' fp32 logits, `[num_tokens, vocab_size]`."""
    import transformers

    def logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            result: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
        return result

    return logits
