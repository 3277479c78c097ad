"""Which builder makes which model family."""

from collections.abc import Callable
from pathlib import Path

import torch

from ..core.errors import ConfigurationError
from ..kernels import KernelSet
from ..vocab.model_config import ModelConfig
from .llama import LlamaModel, build_llama
from .weights import WeightReader

Model = LlamaModel

_BUILDERS: dict[str, Callable[[ModelConfig, WeightReader, KernelSet, str], Model]] = {
    "llama": build_llama,
    "mistral": build_llama,
    "qwen2": build_llama,
    "qwen3": build_llama,
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
    with WeightReader(folder, device or torch.device("cpu")) as weights:
        return builder(config, weights, kernels, dtype)
