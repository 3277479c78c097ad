"""Loading the engine of the Triton kernels: on a GPU, or on the CPU under Triton's interpreter, for tests."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.config import EngineConfig
from ..core.errors import ConfigurationError
from ..core.layout import BlockLayout
from ..core.request import SamplingParams
from ..kernels.gpu.attention_common import MAX_SEQUENCES, can_attend
from ..kernels.gpu.decode_attention import PIECE_TOKENS, DecodeWorkspace
from ..kernels.gpu.kernels import TritonKernels
from ..kernels.gpu.launching import INTERPRETED
from ..models.registry import Model, load_model
from ..vocab.model_config import ModelConfig
from .device_kv_cache_pool import DeviceKVCachePool
from .device_sampler import DeviceSampler
from .device_staging import DeviceStager
from .engine import Engine
from .feedback import make_feedback
from .forward_batch import Chunk, build_forward_batch
from .graph_runner import CudaGraphCapture, GraphRunner, buckets_up_to
from .kv_cache_pool import DTYPES
from .memory import WORKSPACE_POOLS, MemoryUse, PoolSize, graph_bytes, size_pool
from .model_runner import ModelRunner
from .sampler import SamplingRow
from .scoring import launch_scores, rows_per_slice
from .token_counts import TokenCounts

# Decodes that a worker without graphs may have in a step before they need a workspace of their own.
_MIN_WORKSPACE_SEQUENCES = 16


def load_triton_engine(config: EngineConfig, model_config: ModelConfig, layout: BlockLayout) -> Engine:
    """Raises ConfigurationError without a GPU (or the interpreter), and when the card has no room."""
    if config.max_batch > MAX_SEQUENCES:
        raise ConfigurationError(
            f"{config.max_batch} running sequences are more than the {MAX_SEQUENCES} that one step can hold. "
            "Use a smaller --max-running."
        )
    if not can_attend(model_config.head_dim):
        raise ConfigurationError(
            f"{config.model_folder}: head_dim is {model_config.head_dim}; the Triton kernels compute attention for 16 "
            "to 256 in steps of 8. Choose another model, or run this one with --device cpu."
        )
    device = _device(config)
    kernels = TritonKernels(DTYPES[layout.dtype], deterministic=config.deterministic)
    model = load_model(model_config, Path(config.model_folder), kernels, config.dtype, device)
    feedback = make_feedback(device)
    sampler = DeviceSampler(feedback)
    size = PoolSize(config.num_blocks, "")
    if not config.num_blocks:
        size = _Measure(config, model_config, layout, model, sampler, feedback).pool_size()
    pool = DeviceKVCachePool(layout, size.num_blocks, device)
    workspace = _workspace(config, model_config, size.num_blocks * layout.block_size, device)
    stager = DeviceStager(feedback, workspace)
    graphs = None
    if device.type == "cuda":
        warm_up(ModelRunner(model, pool, stager, device), sampler, pool)
        if config.max_batch:
            max_blocks = min(size.num_blocks, layout.num_blocks(model_config.max_position_embeddings))
            graphs = GraphRunner(model, pool, feedback, workspace, config.max_batch, max_blocks)
            graphs.capture(CudaGraphCapture(device))
    runner = ModelRunner(model, pool, stager, device, graphs)
    return Engine(model_config, layout, pool, runner, sampler, overlaps=True, memory_note=size.note)


def warm_up(runner: ModelRunner, sampler: DeviceSampler, pool: DeviceKVCachePool) -> None:
    """Compile and load what has not run yet, in block 0, which nobody owns so far: no request is to wait for it.

    `runner` is not the one that serves: its counters count.
    """
    chunks = [Chunk([0], 0, [0], wants_hidden=True, is_decode=is_decode) for is_decode in (True, False)]
    logits = runner.logits(runner.forward(build_forward_batch(chunks, pool.layout.block_size)))
    for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)):
        sampler.launch(logits, [SamplingRow(params, 0, 0, suppress=(0,))] * len(chunks)).token_ids()
    mask = np.full(-(-logits.shape[1] // 32), -1, np.int32)
    row = SamplingRow(SamplingParams(num_logprobs=1), 0, 0, (0,), counts=TokenCounts([1], [0]), allowed=mask)
    sampler.launch(logits, [row] * len(chunks)).token_ids()
    piece = torch.empty(pool.piece_bytes(1), dtype=torch.uint8, device=logits.device)
    pool.gather([0], 0, 1, piece)
    pool.checksum(piece)
    pool.scatter([0], 0, 1, piece)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cpu":
        if not INTERPRETED:
            raise ConfigurationError(
                "the Triton kernels run on the CPU only under Triton's interpreter (TRITON_INTERPRET=1), which is for "
                "tests. Use kernels 'torch'."
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise ConfigurationError(
            f"device 'cuda': torch {torch.__version__}, {built}, sees no GPU. Check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or use --device cpu."
        )
    device = torch.device("cuda", 0)  # the only one that the launcher lets this process see
    torch.cuda.set_device(device)
    # Sums of half-precision products stay in fp32 until their end, and fp32 means fp32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")
    return device


def _workspace(
    config: EngineConfig, model_config: ModelConfig, pool_tokens: int, device: torch.device
) -> DecodeWorkspace:
    return DecodeWorkspace.allocate(
        max(config.max_batch, _MIN_WORKSPACE_SEQUENCES),
        WORKSPACE_POOLS * pool_tokens,
        model_config.num_heads,
        model_config.head_dim,
        device,
    )


class _Measure:
    """How much of the card is left for the pool, found by running steps of the largest sizes over a small one."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        layout: BlockLayout,
        model: Model,
        sampler: DeviceSampler,
        feedback: Tensor,
    ):
        self._config = config
        self._model_config = model_config
        self._layout = layout
        self._model = model
        self._sampler = sampler
        self._feedback = feedback
        self._device = feedback.device

    def pool_size(self) -> PoolSize:
        config, heads = self._config, self._model_config.num_heads
        torch.cuda.empty_cache()
        weights = torch.cuda.memory_reserved(self._device)
        _, total = torch.cuda.mem_get_info(self._device)
        use = MemoryUse(
            total=total,
            share=config.device_memory_share,
            weights=weights,
            activations=self._step_bytes(max(config.token_budget, config.max_batch, 1)),
            graphs=graph_bytes(len(buckets_up_to(config.max_batch)), self._step_bytes(max(config.max_batch, 1))),
            rings=config.ring_bytes,
        )
        torch.cuda.empty_cache()  # the small pools that were measured over
        per_piece = DecodeWorkspace.num_bytes(0, PIECE_TOKENS, heads, self._model_config.head_dim)
        return size_pool(use, self._layout, -(-per_piece // PIECE_TOKENS), config.kv_bytes)

    @torch.inference_mode()
    def _step_bytes(self, num_tokens: int) -> int:
        """The most that a step of so many tokens, and sampling for a full batch, take beside weights and pool."""
        longest = self._model_config.max_position_embeddings
        lengths = [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]
        blocks = self._layout.num_blocks(max(lengths))
        pool = DeviceKVCachePool(self._layout, blocks, self._device)
        workspace = DecodeWorkspace.allocate(1, 1, self._model_config.num_heads, self._layout.head_dim, self._device)
        runner = ModelRunner(self._model, pool, DeviceStager(self._feedback, workspace), self._device)
        # All chunks may write to the same blocks: nobody reads the result.
        chunks = [Chunk([0] * length, 0, range(blocks), wants_hidden=True) for length in lengths]
        batch = build_forward_batch(chunks, self._layout.block_size)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        hidden = runner.forward(batch)
        if self._config.max_batch:
            rows = [SamplingRow(SamplingParams(top_p=0.9), 0, i, (0,)) for i in range(self._config.max_batch)]
            logits = runner.logits(hidden[:1].expand(len(rows), -1))
            self._sampler.launch(logits, rows).token_ids()
            vocab_size = logits.shape[1]
            scored = min(rows_per_slice(vocab_size), num_tokens)
            launch_scores(runner, self._sampler, hidden[:1].expand(scored, -1), [0] * scored, 1, vocab_size)
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before
