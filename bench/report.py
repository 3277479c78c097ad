"""The result of a benchmark: a table to read, JSON to keep, JSON Lines of single requests."""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from ..core.errors import ConfigurationError
from ..core.latency import Distribution
from .metrics import Metrics
from .options import BenchConfig
from .record import RequestRecord, failure_counts

_WIDTH = 56
_MAX_ERRORS_SHOWN = 5


class ServerInfo(msgspec.Struct, frozen=True):
    """What the server says of itself in /v1/models; None where it does not."""

    model: str
    max_model_len: int | None = None
    vocab_size: int | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one benchmark. `unfinished` requests were not ended when the user interrupted the load."""

    config: BenchConfig
    server: ServerInfo
    started_at: str
    environment: dict[str, str | int | float | list[float]]
    metrics: Metrics
    records: list[RequestRecord]
    notes: list[str]
    unfinished: int = 0

    @property
    def interrupted(self) -> bool:
        return self.unfinished > 0


def environment() -> dict[str, str | int | float | list[float]]:
    """The machine the load came from; with the server on the same one, also the machine that was measured."""
    facts: dict[str, str | int | float | list[float]] = {
        "baton": version("baton-serve"),
        "python": platform.python_version(),
        "aiohttp": version("aiohttp"),
        "system": platform.platform(),
        "processor": _processor_name(),
        "cores": os.cpu_count() or 0,
    }
    if hasattr(os, "sched_getaffinity"):
        facts["usable_cores"] = len(os.sched_getaffinity(0))
    if hasattr(os, "getloadavg"):
        facts["load_average_at_start"] = [round(load, 2) for load in os.getloadavg()]
    return facts


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def now_utc() -> str:
    """The wall-clock time, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def render_table(report: Report) -> str:
    """The result as text, in the row names and order that `vllm bench serve` made customary."""
    metrics = report.metrics
    lines = [_heading("Serving Benchmark Result", "=")]
    lines += _row("Successful requests", metrics.completed)
    lines += _row("Failed requests", metrics.failed)
    if report.unfinished:
        lines += _row("Unfinished requests (interrupted)", report.unfinished)
    lines += _load_rows(report.config)
    lines += _row("Benchmark duration (s)", metrics.duration_s)
    lines += _row("Total input tokens", metrics.total_input_tokens)
    lines += _row("  of these cached", metrics.total_cached_tokens)
    lines += _row("Total generated tokens", metrics.total_output_tokens)
    lines += _row("Request throughput (req/s)", metrics.request_throughput)
    if metrics.request_goodput is not None:
        lines += _row("Request goodput (req/s)", metrics.request_goodput)
    lines += _row("Output token throughput (tok/s)", metrics.output_throughput)
    lines += _row("Total token throughput (tok/s)", metrics.total_token_throughput)
    if metrics.max_send_lag_ms is not None:
        lines += _row("Largest lag of the load generator (ms)", metrics.max_send_lag_ms)
    lines += _distribution_rows("Time to First Token", "TTFT", metrics.ttft_ms)
    lines += _distribution_rows("Time per Output Token (excl. 1st token)", "TPOT", metrics.tpot_ms)
    lines += _distribution_rows("Inter-token Latency", "ITL", metrics.itl_ms)
    lines += _distribution_rows("End-to-end Latency", "E2EL", metrics.e2el_ms)
    lines.append("=" * _WIDTH)
    lines += [f"note: {note}" for note in report.notes]
    lines += _failure_lines(report.records)
    return "\n".join(lines)


def _heading(title: str, fill: str) -> str:
    return f" {title} ".center(_WIDTH, fill) if fill == "=" else title.center(_WIDTH, fill)


def _row(name: str, value: int | float | None) -> list[str]:
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return [f"{name + ':':<41}{shown:<15}".rstrip()]


def _load_rows(config: BenchConfig) -> list[str]:
    if config.load.rate is not None:
        return _row("Request rate configured (req/s)", float(config.load.rate))
    if config.concurrency is not None:
        return _row("Maximum request concurrency", config.concurrency)
    return []


def _distribution_rows(title: str, name: str, values: Distribution | None) -> list[str]:
    lines = [_heading(title, "-")]
    for label in ("mean", "median", "p90", "p95", "p99"):
        value = None if values is None else getattr(values, label)
        lines += _row(f"{label.capitalize()} {name} (ms)", value)
    return lines


def _failure_lines(records: Sequence[RequestRecord]) -> list[str]:
    counts = failure_counts(records)
    lines = [f"failed ({count}): {error}" for error, count in list(counts.items())[:_MAX_ERRORS_SHOWN]]
    if len(counts) > _MAX_ERRORS_SHOWN:
        lines.append(f"... and {len(counts) - _MAX_ERRORS_SHOWN} other errors (the --json file has all)")
    return lines


def write_json(report: Report, command_line: Sequence[str], path: Path) -> None:
    """One JSON object: how it was made, the figures and the failures. Raises ConfigurationError if unwritable."""
    document = {
        "command_line": list(command_line),
        "started_at": report.started_at,
        "seed": report.config.workload.seed,
        "environment": report.environment,
        "server": report.server,
        "config": report.config,
        "concurrency": report.config.concurrency,
        "interrupted": report.interrupted,
        "unfinished": report.unfinished,
        "metrics": report.metrics,
        "notes": report.notes,
        "failures": failure_counts(report.records),
    }
    encoded = msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=2)
    _write(path, encoded + b"\n")


def write_records(records: Sequence[RequestRecord], path: Path) -> None:
    """One line of JSON per request, in the order in which they ended. Raises ConfigurationError if unwritable."""
    _write(path, msgspec.json.Encoder().encode_lines(list(records)))


def check_writable(path: Path) -> None:
    """Raises ConfigurationError when `path` cannot be written, so that no load is run for nothing."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigurationError(f"the result cannot be written to {path}: {error.strerror}") from error


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"the result cannot be written to {path}: {error.strerror}") from error
