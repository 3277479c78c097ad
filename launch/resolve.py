"""Turn "auto" into numbers: (options, machine, model) -> frozen configs. Pure; the arithmetic comes back as text.

A KV budget is found in this order: memory left after the weights of all workers, a share of it for KV, divided
among the workers, at most `MAX_AUTO_KV_BYTES` each. The context is the model's, or what the pool holds if that is less.
"""

import msgspec

from ..core.config import EngineConfig, SchedulerConfig
from ..core.errors import ConfigurationError
from ..core.layout import BlockLayout
from .machine import Machine
from .model_facts import ModelFacts
from .options import EngineOptions
from .sizes import format_size

KV_SHARE = 0.4  # of the memory left after the weights; the rest is for the page cache, the user and activations
MAX_AUTO_KV_BYTES = 2 * 1024**3
WORKER_BASE_BYTES = 400 * 1024**2  # the interpreter, torch and activations of one worker
MIN_POOL_TOKENS = 256
MIN_CONTEXT_LENGTH = 16
CPU_MAX_RUNNING = 64
# A prefill step should be long enough to run at the speed of the matrix units, a decode step short enough that
# the running sequences do not notice a prompt chunk beside them.
PREFILL_TOKEN_BUDGET = 512
DECODE_TOKEN_BUDGET = 256
ITEM_BYTES = {"float32": 4, "float16": 2}


class ResolvedEngine(msgspec.Struct, frozen=True):
    """The same for each worker of one launcher. `explanation` is the arithmetic, a line each."""

    engine: EngineConfig
    context_length: int
    max_running: int
    token_budget: int | None  # as the user set it; None: by role
    transport: str
    explanation: tuple[str, ...]

    @property
    def pool_tokens(self) -> int:
        return self.engine.num_blocks * self.engine.block_size

    def scheduler(self, *, decode: bool) -> SchedulerConfig:
        budget = self.token_budget or (DECODE_TOKEN_BUDGET if decode else PREFILL_TOKEN_BUDGET)
        return SchedulerConfig(
            token_budget=budget,
            # On a prefill worker a long prompt leaves half of each step to the prompts behind it.
            chunk_size=budget if decode else max(1, budget // 2),
            max_running=self.max_running,
        )


def resolve_engine(
    options: EngineOptions, machine: Machine, model: ModelFacts, num_workers: int, threads_taken: int = 0
) -> ResolvedEngine:
    """Settings of `num_workers` equal workers that start on this machine together.

    `threads_taken`: cores that other processes of the same cluster use here already. Raises ConfigurationError when
    the model does not fit, with the sum that shows it.
    """
    dtype = resolve_dtype(options.dtype, machine)
    threads = options.threads or max(1, (machine.cores - threads_taken) // num_workers)
    layout = BlockLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=options.block_size,
        dtype="float32",  # on the CPU activations, and with them keys and values, are float32
    )
    worker_bytes = model.num_parameters * ITEM_BYTES[dtype] + WORKER_BASE_BYTES
    kv_bytes, kv_text = _kv_bytes(options, machine, model, layout, worker_bytes, num_workers)
    num_blocks = kv_bytes // layout.bytes_per_block
    pool_tokens = num_blocks * options.block_size
    _require_useful_pool(options, pool_tokens, kv_bytes, layout)
    context_length = _context_length(options, model, pool_tokens)
    note = f" ({model.note})" if model.note else ""
    explanation = (
        f"{model.name}: {model.num_parameters / 1e6:,.1f} million {dtype} weights{note}, "
        f"context {context_length:,} of {model.max_position_embeddings:,} tokens, {threads} of {machine.cores} core(s) "
        "a worker",
        f"KV cache: {kv_text} / {format_size(layout.bytes_per_token)} a token = {pool_tokens:,} tokens a worker",
    )
    return ResolvedEngine(
        engine=EngineConfig(
            model_folder=model.folder,
            device=options.device,
            kernels="torch",
            dtype=dtype,
            block_size=options.block_size,
            num_blocks=num_blocks,
            threads=threads,
        ),
        context_length=context_length,
        max_running=options.max_running or CPU_MAX_RUNNING,
        token_budget=options.token_budget,
        transport=options.transport,
        explanation=explanation,
    )


def resolve_dtype(asked: str, machine: Machine) -> str:
    """The weights' dtype for --dtype `asked`. Raises ConfigurationError for what this machine cannot compute."""
    if asked == "auto":
        return "float16" if machine.has_fbgemm else "float32"
    if asked == "float16" and not machine.has_fbgemm:
        raise ConfigurationError(
            f"--dtype float16 needs FBGEMM, which torch has for x86-64 only; this machine is {machine.architecture}. "
            "Use --dtype float32."
        )
    return asked


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


def _context_length(options: EngineOptions, model: ModelFacts, pool_tokens: int) -> int:
    wanted = options.context_length
    if wanted is None:
        return min(model.max_position_embeddings, pool_tokens)
    if wanted < MIN_CONTEXT_LENGTH:
        raise ConfigurationError(
            f"--context-length {wanted} leaves no room for a prompt and an answer. Use at least {MIN_CONTEXT_LENGTH}."
        )
    if wanted > model.max_position_embeddings:
        raise ConfigurationError(
            f"--context-length {wanted} is more than {model.name} was made for ({model.max_position_embeddings}). "
            "Ask for that at most."
        )
    if wanted > pool_tokens:
        raise ConfigurationError(
            f"--context-length {wanted} is more than the KV cache of a worker holds ({pool_tokens} tokens). "
            "Ask for less, or give more with --kv-memory."
        )
    return wanted
