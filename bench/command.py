"""`baton bench`: the function that the command line registers."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import Parameter

from ..core.errors import BatonError
from .metrics import parse_goodput
from .options import DEFAULT_URL, BenchConfig, LoadOptions, TargetOptions, WorkloadOptions
from .progress import progress_for
from .report import Report, check_writable, render_table, write_json, write_records
from .run import run

EXIT_OK, EXIT_FAILED_REQUESTS, EXIT_NOT_RUN, EXIT_INTERRUPTED = 0, 1, 2, 130

_DEFAULT_WORKLOAD = WorkloadOptions()
_DEFAULT_LOAD = LoadOptions()
_DEFAULT_TARGET = TargetOptions()


def bench_command(
    url: str = DEFAULT_URL,
    /,
    *,
    workload_options: Annotated[WorkloadOptions, Parameter(name="*")] = _DEFAULT_WORKLOAD,
    load_options: Annotated[LoadOptions, Parameter(name="*")] = _DEFAULT_LOAD,
    target_options: Annotated[TargetOptions, Parameter(name="*")] = _DEFAULT_TARGET,
    goodput: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = (),
    json: Path | None = None,
    records: Path | None = None,
) -> int:
    """Load any OpenAI-compatible server and measure it: TTFT, TPOT, ITL, end-to-end latency, throughput, goodput.

    The definitions are those of `vllm bench serve`. The exit status is 0 when every request succeeded, 1 when one
    failed, 2 when nothing could be measured, 130 after Ctrl-C (which still prints what was measured until then).

    Parameters
    ----------
    url
        Where the server is, with or without a trailing /v1. Give it before the options.
    goodput
        Limits in milliseconds, for example ttft:500 tpot:50 (also e2el): goodput counts requests that keep all.
    json
        Write figures, configuration, environment and failures to this file.
    records
        Write one line of JSON per request (all chunk times) to this file.
    """
    try:
        config = BenchConfig(url, workload_options, load_options, target_options, parse_goodput(goodput))
        for path in filter(None, (json, records)):
            check_writable(path)
        report = uvloop.run(_run_until_interrupted(config))
        print(render_table(report))
        if json is not None:
            write_json(report, sys.argv, json)
        if records is not None:
            write_records(report.records, records)
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_RUN
    except KeyboardInterrupt:  # a second Ctrl-C
        return EXIT_INTERRUPTED
    return _exit_code(report)


async def _run_until_interrupted(config: BenchConfig) -> Report:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)  # the next one ends the process at once
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await run(config, progress_for(sys.stderr), stop)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _exit_code(report: Report) -> int:
    if report.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED_REQUESTS if report.metrics.failed else EXIT_OK
