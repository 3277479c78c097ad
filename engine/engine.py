"""Engine: a model, its KV pool and its sampler in this process."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.config import EngineConfig
from ..core.errors import ConfigurationError
from ..core.layout import BlockLayout
from ..kernels.cpu import CpuKernels
from ..models.registry import load_model
from ..vocab.model_config import ModelConfig, load_model_config
from .dtypes import activation_dtype, kv_layout
from .feedback import make_feedback
from .kv_cache_pool import KVCachePool
from .model_runner import ModelRunner
from .sampler import HostSampler, Sampler
from .staging import HostStager


@dataclass(frozen=True, slots=True)
class Engine:
    """What a worker computes with. The parts share one pool; nothing here decides what runs when."""

    model_config: ModelConfig
    layout: BlockLayout
    pool: KVCachePool
    runner: ModelRunner
    sampler: Sampler
    overlaps: bool  # a launch returns while the device works: plan the next step meanwhile
    memory_note: str = ""  # how the device's memory is divided, in lines for the start table

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks


def load_engine(config: EngineConfig) -> Engine:
    """Load the model and set up its cache; sets the number of torch's threads for this process.

    Raises ConfigurationError when the folder, the device or the dtype cannot be used.
    """
    dtype = activation_dtype(config.device, config.kernels, config.dtype)
    torch.set_num_threads(config.threads)
    model_config = load_model_config(Path(config.model_folder))
    layout = kv_layout(model_config, config.block_size, dtype)
    if config.kernels == "torch":
        return _load_cpu_engine(config, model_config, layout)
    try:
        from .triton_loading import load_triton_engine  # triton is optional
    except ImportError as error:
        raise ConfigurationError(f"kernels 'triton' need triton: {error}. Run `pip install triton`.") from error
    return load_triton_engine(config, model_config, layout)


def _load_cpu_engine(config: EngineConfig, model_config: ModelConfig, layout: BlockLayout) -> Engine:
    if config.deterministic:
        raise ConfigurationError("deterministic=True needs kernels 'triton': the CPU's matrix products are not ours.")
    device = torch.device("cpu")
    pool = KVCachePool(layout, config.num_blocks)
    model = load_model(model_config, Path(config.model_folder), CpuKernels(), config.dtype)
    feedback = make_feedback(device)
    stager = HostStager(pool, feedback, set(model_config.windows))
    runner = ModelRunner(model, pool, stager, device)
    return Engine(model_config, layout, pool, runner, HostSampler(feedback), overlaps=False)
