"""Which builder makes which model family."""

from pathlib import Path

import torch

from ..core.errors import ConfigurationError
from ..kernels import KernelSet
from ..vocab.model_config import ModelConfig
from .decoder import DecoderModel
from .gemma import GemmaBuilder
from .llama import LlamaBuilder
from .load_memory import freed_memory_is_returned
from .mixtral import MixtralBuilder
from .phi3 import Phi3Builder
from .qwen3_moe import Qwen3MoeBuilder
from .weights import WeightReader

Model = DecoderModel

_BUILDERS: dict[str, type[LlamaBuilder]] = {
    "llama": LlamaBuilder,
    "mistral": LlamaBuilder,
    "mixtral": MixtralBuilder,
    "qwen2": LlamaBuilder,
    "qwen3": LlamaBuilder,
    "qwen3_moe": Qwen3MoeBuilder,
    "gemma2": GemmaBuilder,
    "gemma3_text": GemmaBuilder,
    "phi3": Phi3Builder,
}


def load_model(
    config: ModelConfig, folder: Path, kernels: KernelSet, dtype: str, device: torch.device | None = None
) -> Model:
    """Build the model of `config` from the safetensors in `folder`, on `device` (the CPU if none is given).

    `dtype` is how the linear layers are kept. Raises ConfigurationError for an unknown family and for weights that do
    not fit the config.
    """
    builder = _BUILDERS.get(config.family)
    if builder is None:
        raise ConfigurationError(
            f"{folder}: the model family {config.family!r} is not supported. Supported are {', '.join(_BUILDERS)}."
        )
    with freed_memory_is_returned(), WeightReader(folder, device or torch.device("cpu")) as weights:
        return builder(config, weights, kernels, dtype).model()
