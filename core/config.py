"""Frozen configuration, composed and passed. "auto" is resolved by launch/ before any of these is built.

A child process gets its config as msgspec JSON on an inherited pipe. A knob lives in the struct of the part that
owns it.
"""

import msgspec

from .messages import Role
from .queueing import FCFS, QueuePolicy


class EngineConfig(msgspec.Struct, frozen=True):
    """One model on one device.

    On "cuda" the process sees one card (CUDA_VISIBLE_DEVICES is set before it starts) and `num_blocks` is 0: the worker
    measures what is left of its share of the card after weights, activations, graphs and rings, and takes that.
    """

    model_folder: str  # holds config.json, safetensors, tokenizer.json
    device: str  # "cpu" or "cuda"
    kernels: str  # "torch" (the CPU path) or "triton"
    dtype: str  # of the weights: float16, float32, bfloat16, int8; activations: see engine/dtypes.py
    block_size: int
    num_blocks: int
    threads: int
    deterministic: bool = False  # dense layers on our own GEMM too: same bits whatever shares the batch
    max_batch: int = 0  # sequences a decode graph must hold at most; 0: no graphs (prefill workers, the CPU)
    device_memory_share: float = 0.0  # of the card's memory, for this process alone; 0 on the CPU
    kv_bytes: int = 0  # on cuda: what --kv-memory asked for; 0: all that is left of the share
    token_budget: int = 0  # on cuda: tokens of the largest step, whose activations are measured
    ring_bytes: int = 0  # on cuda: device memory that this worker's staging rings may take


class TransferConfig(msgspec.Struct, frozen=True):
    """How KV travels. `transport`: "auto" picks the best for each pair (docs/transfer_protocol.md), or one of
    shared_memory, tcp, gloo, nccl, cuda_ipc, pinned_memory.
    """

    transport: str = "auto"
    ring_slots: int = 16
    slot_bytes: int = 2 * 1024 * 1024
    lease_s: float = 30.0  # a hand-over without a sign of life for so long is given up


class SchedulerConfig(msgspec.Struct, frozen=True):
    """Batch limits of one worker."""

    token_budget: int  # tokens computed in one step
    chunk_size: int  # tokens of one prompt computed in one step
    max_running: int  # sequences in the running batch
    max_waiting: int = 1024  # requests accepted beyond that
    # Where tuners may move the settings above, least and greatest; None: they are fixed.
    token_budget_range: tuple[int, int] | None = None
    max_running_range: tuple[int, int] | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    policy: QueuePolicy = FCFS


class NetworkConfig(msgspec.Struct, frozen=True):
    """Where this process listens and whom it joins. `run_dir`: the run's 0700 directory ("" for a joined worker)."""

    run_dir: str
    listen_host: str  # TCP address peers reach this worker at
    join: tuple[str, ...]  # gateways: ipc:// or tcp:// addresses
    key_file: str  # CURVE keys of the cluster; used on every TCP socket


class WorkerConfig(msgspec.Struct, frozen=True):
    """One worker. It has both roles; `roles` are those that gateways give it requests for at first.

    `context_may_shrink`: nobody asked for `context_length`, so it shrinks to what the pool holds,
    which is known on "cuda" only when the model is loaded.
    """

    worker_id: str
    roles: tuple[Role, ...]
    served_model: str
    model_digest: str  # of weights, dtype and tokenizer; a gateway refuses a worker whose digest differs
    context_length: int  # tokens a request may have in all
    engine: EngineConfig
    prefill: SchedulerConfig
    decode: SchedulerConfig
    transfer: TransferConfig
    network: NetworkConfig
    context_may_shrink: bool = False
    device_uuid: str = ""  # of the one card this process sees, as nvidia-smi writes it; "" on the CPU
    device_name: str = ""  # of that card, for people
    log_level: str = "info"
    debug: bool = False


class GatewayConfig(msgspec.Struct, frozen=True):
    """The HTTP side. Limits are in bytes, seconds and counts."""

    gateway_id: str
    served_model: str
    model_folder: str
    model_digest: str
    host: str
    port: int
    bind: tuple[str, ...]  # addresses workers join at: ipc:// first, then tcp:// (CURVE)
    key_file: str
    expected_prefill: int  # workers the launcher starts; /ready waits for one of each kind that is expected
    expected_decode: int
    max_body_bytes: int = 16 * 1024 * 1024
    max_queue: int = 256  # requests waiting for credit; beyond that 429
    max_queue_delay_s: float = 60.0  # waiting longer than this ends in 429
    keep_alive_s: float = 5.0  # an SSE comment this often while nothing else is sent
    worker_timeout_s: float = 10.0  # silence after which a worker counts as gone
    policy: QueuePolicy = FCFS
    ttft_target_s: float | None = None  # who cannot be in time any more is refused
    tpot_target_s: float | None = None
    is_elastic: bool = False  # workers' roles follow the load
    may_prefill_locally: bool = True  # decode workers compute prompts where that is faster
    api_key_digests: tuple[str, ...] = ()  # SHA-256 of each key that is good; none: no key is asked for
    batch_dir: str = ""  # where files and batches are kept, also over a restart; "": they are not served
    drain_timeout_s: float = 300.0  # how long accepted requests may take to finish after the first stop signal
    log_level: str = "info"
    debug: bool = False
