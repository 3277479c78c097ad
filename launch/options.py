"""What the user asked for on the command line, before "auto" is resolved. None means auto."""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from cyclopts import Parameter

from ..core.errors import ConfigurationError
from ..core.layout import BLOCK_SIZES
from ..core.queueing import FAIR, POLICIES, QueuePolicy
from .sizes import parse_duration, parse_size

DTYPES = ("auto", "bfloat16", "float16", "float32", "int8")
KERNELS = ("auto", "torch", "triton")
LOCAL_PREFILL = ("auto", "never")
TRANSPORTS = ("auto", "shared_memory", "tcp", "gloo", "nccl", "cuda_ipc", "pinned_memory")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEVICES = ("auto", "cpu", "cuda")
MAX_RUNNING = 1024  # sequences that one launch of decode attention takes (kernels/gpu/attention_common.py)


@dataclass(frozen=True)
class SchedulingFlags:
    """Flags of every command that starts a gateway or a worker, as typed."""

    policy: str = "fair"
    "Who goes first: fcfs, priority, fair (between API keys, within a priority) or shortest (prompts first)."

    ttft_target: Annotated[str, Parameter(allow_leading_hyphen=True)] = "none"
    "Time to the first token, for example 500ms: prefill workers choose their batch sizes for it."

    tpot_target: Annotated[str, Parameter(allow_leading_hyphen=True)] = "none"
    "Time per further token, for example 50ms: decode workers choose their batch sizes for it."

    elastic: Annotated[bool, Parameter(negative="")] = False
    "Workers' roles follow the load: one of the pool that waits less helps the other."


@dataclass(frozen=True)
class EngineFlags(SchedulingFlags):
    """Flags that every command with a worker takes, as typed."""

    device: str = "auto"
    "Where the model runs: auto (a GPU where there is one), cpu, cuda, or one card: cuda:1."

    kernels: str = "auto"
    "Who computes: auto, torch (the CPU path) or triton (Baton's GPU kernels)."

    dtype: str = "auto"
    "Weights: auto, bfloat16 or int8 (GPU), float16, float32 (exact, slower)."

    deterministic: Annotated[bool, Parameter(negative="")] = False
    "The same bits whatever else runs, on a GPU: dense layers on Baton's own kernels too."

    block_size: int = 16
    "Tokens in a KV-cache block: a power of two up to 128."

    kv_memory: str = "auto"
    "KV cache of each worker, for example 2G."

    threads: str = "auto"
    "Compute threads of each worker; auto shares the cores out."

    context_length: Annotated[str, Parameter(alias="--max-model-len")] = "auto"
    "Tokens a request may have, prompt and answer together."

    max_running: str = "auto"
    "Requests one worker runs at a time."

    token_budget: str = "auto"
    "Tokens one step of a worker computes at most."

    transport: str = "auto"
    "How KV travels between workers: auto, shared_memory, tcp, gloo (CPU), nccl, cuda_ipc or pinned_memory (GPU)."


@dataclass(frozen=True)
class PoolFlags:
    """Which workers `baton serve` starts, and where, as typed."""

    prefill: int = 1
    "Prefill workers; 0 serves colocated, each decode worker computes its prompts itself."

    decode: int = 1
    "Decode workers."

    prefill_devices: str = "auto"
    "Cards of the prefill workers, for example 0,1: indices or UUIDs, dealt out in turn."

    decode_devices: str = "auto"
    "Cards of the decode workers."


@dataclass(frozen=True)
class GatewayFlags:
    """Flags of the commands that start a gateway, as typed."""

    host: str = "127.0.0.1"
    "Address to listen on; with any other than this machine's own use --api-key."

    port: int = 8000
    "Port to listen on; 0 takes any free one and prints it."

    served_model_name: str | None = None
    "Model name clients see, instead of the model's own."

    local_prefill: str = "auto"
    "auto: a decode worker computes a prompt where that is faster; never: none does while there is a prefill worker."

    join_address: str = "127.0.0.1:0"
    "HOST:PORT at which workers of other hosts join."

    batch_dir: str = "auto"
    "Folder for /v1/files and /v1/batches; auto: a folder for this model and port in Baton's cache. none: not served."

    api_key: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "A key that clients must send, or @FILE with a key a line; may be repeated. None: anybody may ask."


@dataclass(frozen=True)
class CommonFlags:
    """Flags of every command that starts processes."""

    log_level: str = "info"
    "debug, info, warning or error."

    debug: Annotated[bool, Parameter(negative="")] = False
    "Show tracebacks."


class EngineOptions(msgspec.Struct, frozen=True):
    """One worker's engine and batch limits; the same for all workers of one launcher."""

    device: str
    dtype: str
    block_size: int
    kv_memory: int | None  # bytes of KV cache a worker
    threads: int | None
    context_length: int | None
    max_running: int | None
    token_budget: int | None
    transport: str
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    kernels: str = "auto"
    deterministic: bool = False
    card: str = "auto"  # the only card to use: its index or UUID
    policy: QueuePolicy = FAIR
    is_elastic: bool = False


class HostPort(msgspec.Struct, frozen=True):
    """A TCP address; port 0 asks for any free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def text(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_engine_options(flags: EngineFlags) -> EngineOptions:
    """Check the flags one by one. Raises ConfigurationError naming the first one that cannot be."""
    device, card = _device(flags.device)
    require_choice("--kernels", flags.kernels, KERNELS)
    require_choice("--dtype", flags.dtype, DTYPES)
    require_choice("--transport", flags.transport, TRANSPORTS)
    require_choice("--policy", flags.policy, tuple(POLICIES))
    if flags.block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise ConfigurationError(
            f"--block-size {flags.block_size} is not a power of two up to 128. Use one of {sizes}."
        )
    return EngineOptions(
        device=device,
        dtype=flags.dtype,
        block_size=flags.block_size,
        kv_memory=None if flags.kv_memory == "auto" else parse_size(flags.kv_memory, "--kv-memory"),
        threads=_count("--threads", flags.threads),
        context_length=_count("--context-length", flags.context_length),
        max_running=_count("--max-running", flags.max_running, MAX_RUNNING),
        token_budget=_count("--token-budget", flags.token_budget),
        transport=flags.transport,
        ttft_target_s=_target("--ttft-target", flags.ttft_target),
        tpot_target_s=_target("--tpot-target", flags.tpot_target),
        kernels=flags.kernels,
        deterministic=flags.deterministic,
        card=card,
        policy=POLICIES[flags.policy],
        is_elastic=flags.elastic,
    )


def parse_local_prefill(flags: GatewayFlags) -> bool:
    """May decode workers compute prompts while there is a prefill worker?"""
    require_choice("--local-prefill", flags.local_prefill, LOCAL_PREFILL)
    return flags.local_prefill == "auto"


def _target(option: str, text: str) -> float | None:
    """Seconds; "none": no target."""
    return None if text == "none" else parse_duration(text, option)


def require_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{option} {value!r} is not known. Use one of {', '.join(choices)}.")


def require_port(option: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"{option} {port} is not a port. Use 1 to 65535, or 0 for any free one.")


def parse_host_port(option: str, text: str) -> HostPort:
    """`127.0.0.1:8001`, `[::1]:8001`, with or without `tcp://`. Raises ConfigurationError naming `option`."""
    host, separator, port = text.removeprefix("tcp://").rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ConfigurationError(f"{option} {text!r} is not an address. Write HOST:PORT, for example 127.0.0.1:8001.")
    require_port(option, int(port))
    return HostPort(host.strip("[]"), int(port))


def _device(text: str) -> tuple[str, str]:
    """`cuda:1` -> ("cuda", "1")."""
    device, colon, card = text.partition(":")
    if colon and (device != "cuda" or not card or "," in card):
        raise ConfigurationError(f"--device {text!r} is not known. Name one card as cuda:0, or by UUID: cuda:GPU-1a2b.")
    require_choice("--device", device, (*DEVICES, "cuda:INDEX") if device not in DEVICES else DEVICES)
    return device, card or "auto"


def _count(option: str, text: str, most: int | None = None) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigurationError(f"{option} {text!r} is not a positive whole number. Give one, or auto.")
    if most is not None and int(text) > most:
        raise ConfigurationError(f"{option} {text} is more than a worker can have. Use {most} at most, or auto.")
    return int(text)
