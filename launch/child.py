"""A process of the cluster: `python -P -m baton.launch.child gateway|worker NAME FD`.

NAME is for whoever looks at the list of processes. FD is the read end of a pipe: one line of msgspec JSON, the frozen
config, and then nothing. The pipe stays open as long as whoever started this process lives; when it closes, this
process ends at once, whatever it is doing.

Exit codes: 0 drained, 1 a crash, 2 a configuration that cannot work (not worth a restart), 3 the launcher is gone,
130 Ctrl-C before it was up.
"""

import contextlib
import logging
import os
import signal
import sys
import threading

import msgspec

from ..core.config import GatewayConfig, WorkerConfig
from ..core.errors import ConfigurationError

EXIT_OK, EXIT_CRASHED, EXIT_CONFIGURATION, EXIT_ORPHANED = 0, 1, 2, 3
EXIT_INTERRUPTED = 130
MAX_CONFIG_BYTES = 64 * 1024  # what a pipe holds, so that writing it never waits for the reader

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Read the config, watch the pipe, build the process and run it until it has drained."""
    kind, descriptor = arguments[0], int(arguments[-1])
    config = read_config(kind, descriptor)
    watch_launcher(descriptor)
    set_up_logging(config.log_level)
    try:
        # `launch/join.py` blocked it until here: a Ctrl-C while Python starts would print a traceback.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        run(config)
    except ConfigurationError as error:  # any other error is a crash: its traceback is wanted, and a restart may help
        if config.debug:
            raise
        logger.error("%s", error)
        return EXIT_CONFIGURATION
    except KeyboardInterrupt:  # while it starts; later SIGINT drains
        return EXIT_INTERRUPTED
    return EXIT_OK


def read_config(kind: str, descriptor: int) -> GatewayConfig | WorkerConfig:
    """The first line of the pipe."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(descriptor, MAX_CONFIG_BYTES)
        if not part:
            os._exit(EXIT_ORPHANED)
        line += part
    if kind == "gateway":
        return msgspec.json.decode(line, type=GatewayConfig)
    return msgspec.json.decode(line, type=WorkerConfig)


def run(config: GatewayConfig | WorkerConfig) -> None:
    """Imports come here, late: the gateway must never load torch, a worker no HTTP server."""
    if isinstance(config, GatewayConfig):
        from ..gateway.app import run_gateway

        run_gateway(config)
    else:
        from .worker_process import run_worker

        run_worker(config)


def set_up_logging(level: str) -> None:
    """One line an event on stderr: time, level, text. Prompts are never logged."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )


def watch_launcher(descriptor: int) -> None:
    """End this process when the pipe closes: nothing may outlive the launcher.

    In a thread of its own, so that a long forward pass does not delay the end.
    """
    threading.Thread(target=_wait_for_the_end, args=(descriptor,), name="launcher-watch", daemon=True).start()


def _wait_for_the_end(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a broken descriptor says the same as a closed pipe
        while os.read(descriptor, 1):
            pass
    os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
