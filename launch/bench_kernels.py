"""`baton bench kernels`: each op on this device beside what the device can do at best."""

import json as json_format
import sys
from pathlib import Path

from .. import __version__
from ..bench.report import check_writable, environment

EXIT_OK, EXIT_FAILED = 0, 1


def bench_kernels(*, device: str = "auto", model: str = "auto", threads: int = 1, json: Path | None = None) -> int:
    """Measure this device's limits, then every op that serving uses here, and say what part of the limit it reaches.

    On a GPU the ops are Baton's Triton kernels (with cuBLAS and torch's attention beside them), on the CPU the ops of
    the CPU path. Takes about a minute.

    Parameters
    ----------
    device
        auto (a GPU where there is one), cpu or cuda.
    model
        Whose sizes: smollm2-135m, llama-3.1-8b, qwen3-0.6b or qwen3-30b-a3b; auto is the first on the CPU, the second
        on a GPU.
    threads
        Compute threads, on the CPU.
    json
        Write all figures to this file.
    """
    from ..engine.measuring.bench import KernelBench  # torch takes seconds, which --help need not

    if json is not None:
        check_writable(json)
    machine = environment()
    bench = KernelBench(device, model, threads, str(machine["processor"]))
    print("\n".join(bench.run(_show if sys.stderr.isatty() else lambda _: None)))
    if json is not None:
        content = {"command": sys.argv, "baton": __version__, "machine": machine, **bench.as_json()}
        json.write_text(json_format.dumps(content, indent=1) + "\n")
    return EXIT_FAILED if bench.num_failed else EXIT_OK


def _show(what: str) -> None:
    """One line that is overwritten, and cleared at the end."""
    print(f"\r\033[K{f'measuring {what}' if what else ''}", end="", file=sys.stderr, flush=True)
