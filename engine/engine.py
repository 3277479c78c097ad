"""Engine: a model, its KV pool and its sampler in this process."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.config import EngineConfig
from ..core.errors import ConfigurationError
from ..core.layout import BlockLayout
from ..kernels import LINEAR_DTYPES
from ..models.registry import load_model
from ..vocab.model_config import ModelConfig, load_model_config
from .kv_cache_pool import KVCachePool
from .model_runner import ModelRunner
from .sampler import Sampler


@dataclass(frozen=True, slots=True)
class Engine:
    """What a worker computes with. The parts share one pool; nothing here decides what runs when."""

    model_config: ModelConfig
    layout: BlockLayout
    pool: KVCachePool
    runner: ModelRunner
    sampler: Sampler


def kv_layout(model_config: ModelConfig, block_size: int) -> BlockLayout:
    """The block layout of a model on the CPU, where activations, and so keys and values, are float32."""
    return BlockLayout(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=block_size,
        dtype="float32",
    )


def load_engine(config: EngineConfig) -> Engine:
    """Load the model and set up its cache; sets the number of torch's threads for this process.

    Raises ConfigurationError when the folder, the device or the dtype cannot be used.
    """
    if config.device != "cpu":
        raise ConfigurationError(f"device {config.device!r} is not supported yet. Use --device cpu.")
    if config.dtype not in LINEAR_DTYPES:
        raise ConfigurationError(f"dtype {config.dtype!r} is not supported. Use {' or '.join(LINEAR_DTYPES)}.")
    torch.set_num_threads(config.threads)
    folder = Path(config.model_folder)
    model_config = load_model_config(folder)
    layout = kv_layout(model_config, config.block_size)
    pool = KVCachePool(layout, config.num_blocks)
    model = load_model(model_config, folder, config.dtype)
    return Engine(model_config, layout, pool, ModelRunner(model, pool), Sampler())
