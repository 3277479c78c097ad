"""What a benchmark is asked to do: frozen options, one group per part that owns them. Field docs are the CLI's help."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..core.errors import ConfigurationError

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_CONCURRENCY = 8

Endpoint = Literal["completions", "chat"]
WorkloadName = Literal["random", "shared-prefix", "multi-turn", "trace"]


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Which requests are sent."""

    workload: WorkloadName = "random"
    """random: unrelated prompts; shared-prefix: prompts that begin with one of a few prefixes; multi-turn:
    conversations that grow; trace: the lengths, times and shared blocks of a Mooncake-format file."""
    num_requests: int = 64
    """Requests in total (each turn is one); for a trace, its first rows."""
    input_len: int = 256
    """Tokens of a prompt; what comes after the prefix (shared-prefix); the user's words in each turn (multi-turn)."""
    output_len: int = 64
    """Tokens to generate for each request; the server is told to ignore its end-of-sequence token."""
    prefix_len: int = 1024
    """Tokens of a shared prefix."""
    num_prefixes: int = 4
    """How many different shared prefixes there are."""
    turns: int = 4
    """Turns of a conversation."""
    trace: Path | None = None
    """JSON Lines with timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens)."""
    seed: int = 0
    """Fixes prompts and arrival times."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How the requests are offered."""

    rate: float | None = None
    """Open loop: requests per second, Poisson arrivals; a trace keeps its bursts and is stretched to this rate."""
    concurrency: int | None = None
    """Closed loop: requests in flight at once. The default is 8, or a trace's own times."""
    warmup: int = 0
    """Requests sent before the measurement and left out of it."""
    timeout: float = 600.0
    """Seconds a request may take before it counts as failed."""


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Who is asked, and how."""

    model: str | None = None
    """Model name to ask for. The default is the first one that the server lists."""
    endpoint: Endpoint = "completions"
    """completions sends token ids where the vocabulary size is known, else text; chat always sends text."""
    vocab_size: int | None = None
    """Size of the model's vocabulary, where the server does not publish it in /v1/models."""


@dataclass(frozen=True)
class BenchConfig:
    """A whole benchmark. `goodput_ms` maps a metric (ttft, tpot, e2el) to its limit in milliseconds."""

    url: str = DEFAULT_URL
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    target: TargetOptions = field(default_factory=TargetOptions)
    goodput_ms: dict[str, float] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """`url` with a scheme, without a trailing `/v1`."""
        url = self.url if "://" in self.url else f"http://{self.url}"
        return url.rstrip("/").removesuffix("/v1")

    @property
    def concurrency(self) -> int | None:
        """Requests in flight at once in a closed loop; None in an open loop (a rate, or a trace's own times)."""
        if self.load.concurrency is not None:
            return self.load.concurrency
        open_loop = self.load.rate is not None or self.workload.workload == "trace"
        return None if open_loop else DEFAULT_CONCURRENCY

    def check(self) -> None:
        """Raises ConfigurationError that names the first option with an impossible value."""
        work, load = self.workload, self.load
        for flag, value in (
            ("--num-requests", work.num_requests),
            ("--input-len", work.input_len),
            ("--output-len", work.output_len),
            ("--prefix-len", work.prefix_len),
            ("--num-prefixes", work.num_prefixes),
            ("--turns", work.turns),
            ("--concurrency", load.concurrency),
            ("--rate", load.rate),
            ("--timeout", load.timeout),
        ):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigurationError(f"{flag} {value}: must be a finite number above 0")
        if load.warmup < 0:
            raise ConfigurationError(f"--warmup {load.warmup}: must be 0 or more")
        if load.rate is not None and load.concurrency is not None:
            raise ConfigurationError(
                "--rate and --concurrency exclude each other: an open loop sends at given times whatever is in "
                "flight, a closed loop holds the number in flight; give one of them"
            )
        if (work.workload == "trace") != (work.trace is not None):
            raise ConfigurationError("--workload trace and --trace FILE belong together; give both or neither")
