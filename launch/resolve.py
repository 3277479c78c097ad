"""Turn "auto" into numbers: (options, machine, model) -> frozen configs. Pure; the arithmetic comes back as text.

A KV budget on the CPU is found in this order: memory left after the weights of all workers, a share of it for KV,
divided among the workers, at most `MAX_AUTO_KV_BYTES` each. On a GPU each worker measures what is left of its share of
the card (engine/memory.py). The context is the model's, or what the pool holds if that is less.
"""

from collections.abc import Iterable

import msgspec

from ..core.config import EngineConfig, SchedulerConfig
from ..core.errors import ConfigurationError
from ..core.layout import BlockLayout
from .compute import Compute
from .machine import Machine
from .model_facts import ModelFacts
from .options import EngineOptions
from .placement import DeviceSlot
from .sizes import format_size

KV_SHARE = 0.4  # of the memory left after the weights; the rest is for the page cache, the user and activations
MAX_AUTO_KV_BYTES = 2 * 1024**3
WORKER_BASE_BYTES = 400 * 1024**2  # the interpreter, torch and activations of one worker
MIN_POOL_TOKENS = 256
MIN_CONTEXT_LENGTH = 16
CPU_MAX_RUNNING = 64
GPU_MAX_RUNNING = 256
# A prefill step should be long enough to run at the speed of the matrix units, a decode step short enough that
# the running sequences do not notice a prompt chunk beside them.
TOKEN_BUDGETS = {  # (device, decode)
    ("cpu", False): 512,
    ("cpu", True): 256,
    ("cuda", False): 8192,
    ("cuda", True): 2048,
}
MIN_TOKEN_BUDGET = 16  # of a tuner
# Of a prefill tuner without a target. On a CPU the learned base of a step can be next to nothing, which would put the
# knee at the least budget of all, where what each step costs the host is felt.
MIN_KNEE_BUDGET = 64
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


class ResolvedEngine(msgspec.Struct, frozen=True):
    """The same for each worker of one launcher. `explanation` is the arithmetic, a line each."""

    engine: EngineConfig
    context_length: int
    context_may_shrink: bool  # to the pool, when its size is known
    options: EngineOptions
    explanation: tuple[str, ...]

    @property
    def pool_tokens(self) -> int:
        """0 on a GPU, where the worker measures it."""
        return self.engine.num_blocks * self.engine.block_size

    @property
    def max_running(self) -> int:
        return self.options.max_running or (GPU_MAX_RUNNING if self.engine.device == "cuda" else CPU_MAX_RUNNING)

    def scheduler(self, *, decode: bool) -> SchedulerConfig:
        """Batch limits of a worker. Its tuner may move what the user has not fixed: towards the target of its pool, or
        without one to the knee of its throughput/latency curve.
        """
        options = self.options
        budget = options.token_budget or TOKEN_BUDGETS[self.engine.device, decode]
        is_knee = not decode and options.ttft_target_s is None
        least = MIN_KNEE_BUDGET if is_knee else MIN_TOKEN_BUDGET
        return SchedulerConfig(
            token_budget=budget,
            # On a prefill worker a long prompt leaves half of each step to the prompts behind it.
            chunk_size=budget if decode else max(1, budget // 2),
            max_running=self.max_running,
            token_budget_range=self._token_budget_range(budget, least),
            max_running_range=(options.max_running or 1, self.max_running),
            ttft_target_s=options.ttft_target_s,
            tpot_target_s=options.tpot_target_s,
            policy=options.policy,
        )

    def _token_budget_range(self, budget: int, least: int) -> tuple[int, int]:
        """Where a tuner may move it, down to `least`.

        A GPU's memory is measured with the default, so there it is the greatest one.
        """
        if self.options.token_budget is not None:
            return budget, budget
        return least, budget if self.engine.device == "cuda" else 2 * budget

    def engine_config(self, *, decode: bool, share: float, ring_bytes: int) -> EngineConfig:
        """Of one worker. `share` of its card's memory and `ring_bytes` of it for hand-overs count on a GPU only.

        Roles can always change; only with --elastic, where they will, does a worker keep memory for both.
        """
        if self.engine.device == "cpu":
            return self.engine
        kinds = (False, True) if self.options.is_elastic else (decode,)
        return msgspec.structs.replace(
            self.engine,
            max_batch=self.max_running if True in kinds else 0,
            device_memory_share=share,
            token_budget=max(self.scheduler(decode=kind).token_budget for kind in kinds),
            ring_bytes=ring_bytes,
        )


def resolve_engine(
    options: EngineOptions,
    compute: Compute,
    machine: Machine,
    model: ModelFacts,
    num_workers: int,
    threads_taken: int = 0,
) -> ResolvedEngine:
    """Settings of `num_workers` equal workers that start on this machine together.

    `threads_taken`: cores that other processes of the same cluster use here already. Raises ConfigurationError when
    the model does not fit, with the sum that shows it.
    """
    layout = BlockLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=options.block_size,
        dtype=compute.kv_dtype,
    )
    weights = f"{model.name}: {model.num_parameters / 1e6:,.1f} million {compute.dtype} weights"
    weights += f" ({model.note})" if model.note else ""
    if compute.device == "cuda":
        return _on_gpu(options, compute, model, layout, weights)
    threads = options.threads or max(1, (machine.cores - threads_taken) // num_workers)
    worker_bytes = weight_bytes(model, compute.dtype) + WORKER_BASE_BYTES
    kv_bytes, kv_text = _kv_bytes(options, machine, model, layout, worker_bytes, num_workers)
    num_blocks = kv_bytes // layout.bytes_per_block
    pool_tokens = num_blocks * options.block_size
    _require_useful_pool(options, pool_tokens, kv_bytes, layout)
    context_length = _context_length(options, model, pool_tokens)
    return ResolvedEngine(
        engine=_engine_config(options, compute, model, num_blocks, threads),
        context_length=context_length,
        context_may_shrink=False,
        options=options,
        explanation=(
            f"{weights}, context {context_length:,} of {model.max_position_embeddings:,} tokens, "
            f"{threads} of {machine.cores} core(s) a worker",
            f"KV cache: {kv_text} / {format_size(layout.bytes_per_token)} a token = {pool_tokens:,} tokens a worker",
        ),
    )


def weight_bytes(model: ModelFacts, dtype: str) -> int:
    return model.num_parameters * ITEM_BYTES[dtype]


def require_weights_fit(model: ModelFacts, dtype: str, slots: Iterable[DeviceSlot]) -> None:
    """Known before anything is loaded: a share that the weights alone fill. Raises ConfigurationError with the sum."""
    weights = weight_bytes(model, dtype)
    for slot in slots:
        room = int(slot.share * slot.gpu.total_bytes)
        if slot.gpu.total_bytes and room <= weights:
            raise ConfigurationError(
                f"{model.name} does not fit: its {dtype} weights take {format_size(weights)}, and a worker has "
                f"{slot.share:.0%} of {slot.gpu.text} = {format_size(room)}. Use more cards, fewer workers, a smaller "
                "model, or --dtype int8."
            )


def _on_gpu(
    options: EngineOptions, compute: Compute, model: ModelFacts, layout: BlockLayout, weights: str
) -> ResolvedEngine:
    """The pool's size is left to the worker, which measures; what the user fixed is checked here already."""
    per_token = f"{format_size(layout.bytes_per_token)} a token"
    pool_tokens = None
    text = (
        f"KV cache: {per_token}; each worker takes what weights, activations, graphs and rings leave of its share of "
        "a card, measured once it has loaded"
    )
    if options.kv_memory is not None:
        pool_tokens = options.kv_memory // layout.bytes_per_block * options.block_size
        _require_useful_pool(options, pool_tokens, options.kv_memory, layout)
        text = (
            f"KV cache: {format_size(options.kv_memory)} (--kv-memory) / {per_token} = {pool_tokens:,} tokens a worker"
        )
    context_length = _context_length(options, model, pool_tokens)
    size = format_size(weight_bytes(model, compute.dtype))
    return ResolvedEngine(
        engine=_engine_config(options, compute, model, 0, options.threads or 1),
        context_length=context_length,
        context_may_shrink=options.context_length is None,
        options=options,
        explanation=(
            f"{weights}, {size} a worker, context up to {context_length:,} tokens, {compute.kernels} kernels"
            f"{' for the dense layers too (--deterministic)' if options.deterministic else ''}",
            text,
        ),
    )


def _engine_config(
    options: EngineOptions, compute: Compute, model: ModelFacts, num_blocks: int, threads: int
) -> EngineConfig:
    on_gpu = compute.device == "cuda"
    return EngineConfig(
        model_folder=model.folder,
        device=compute.device,
        kernels=compute.kernels,
        dtype=compute.dtype,
        block_size=options.block_size,
        num_blocks=num_blocks,
        threads=threads,
        deterministic=options.deterministic,
        kv_bytes=(options.kv_memory or 0) if on_gpu else 0,
    )


def _kv_bytes(
    options: EngineOptions,
    machine: Machine,
    model: ModelFacts,
    layout: BlockLayout,
    worker_bytes: int,
    num_workers: int,
) -> tuple[int, str]:
    """KV bytes of one worker, and how they were found. `worker_bytes`: what each takes besides."""
    weights = num_workers * worker_bytes
    left = machine.memory - weights
    sum_text = (
        f"{format_size(machine.memory)} available - {format_size(weights)} for {num_workers} worker(s) with weights"
    )
    if left <= 0:
        raise ConfigurationError(
            f"{model.name} does not fit into memory: {sum_text} leaves nothing for the KV cache. "
            "Start fewer workers, take a smaller model, or free some memory."
        )
    if options.kv_memory is not None:
        if options.kv_memory * num_workers > left:
            raise ConfigurationError(
                f"--kv-memory {format_size(options.kv_memory)} for each of {num_workers} worker(s) does not fit: "
                f"{sum_text} = {format_size(left)}. Ask for less, or leave it at auto."
            )
        return options.kv_memory, f"{format_size(options.kv_memory)} (--kv-memory)"
    share = int(left * KV_SHARE) // num_workers
    most_useful = (options.max_running or CPU_MAX_RUNNING) * model.max_position_embeddings * layout.bytes_per_token
    if share >= min(MAX_AUTO_KV_BYTES, most_useful):
        if most_useful < MAX_AUTO_KV_BYTES:
            return most_useful, f"{format_size(most_useful)} (all running requests at full context)"
        return MAX_AUTO_KV_BYTES, f"{format_size(MAX_AUTO_KV_BYTES)} (the most auto takes)"
    return share, f"({sum_text}) x {KV_SHARE:.0%} / {num_workers} = {format_size(share)}"


def _require_useful_pool(options: EngineOptions, pool_tokens: int, kv_bytes: int, layout: BlockLayout) -> None:
    if pool_tokens < MIN_POOL_TOKENS:
        option = "--kv-memory" if options.kv_memory is not None else "the memory left for KV,"
        raise ConfigurationError(
            f"{option} {format_size(kv_bytes)} holds {pool_tokens} tokens of {format_size(layout.bytes_per_token)}; at "
            f"least {MIN_POOL_TOKENS} are needed ({format_size(MIN_POOL_TOKENS * layout.bytes_per_token)}). "
            "Give more memory, or start fewer workers."
        )


def _context_length(options: EngineOptions, model: ModelFacts, pool_tokens: int | None) -> int:
    """`pool_tokens` None: not known yet."""
    wanted = options.context_length
    if wanted is None:
        return min(model.max_position_embeddings, pool_tokens or model.max_position_embeddings)
    if wanted < MIN_CONTEXT_LENGTH:
        raise ConfigurationError(
            f"--context-length {wanted} leaves no room for a prompt and an answer. Use at least {MIN_CONTEXT_LENGTH}."
        )
    if wanted > model.max_position_embeddings:
        raise ConfigurationError(
            f"--context-length {wanted} is more than {model.name} was made for ({model.max_position_embeddings}). "
            "Ask for that at most."
        )
    if pool_tokens is not None and wanted > pool_tokens:
        raise ConfigurationError(
            f"--context-length {wanted} is more than the KV cache of a worker holds ({pool_tokens} tokens). "
            "Ask for less, or give more with --kv-memory."
        )
    return wanted
