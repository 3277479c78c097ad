"""Build a worker with both roles and run it: the one place that knows both prefill and decode."""

import logging
import signal
from types import FrameType

from ..core.config import WorkerConfig
from ..core.messages import Role
from ..decode.role import DecodeRole
from ..prefill.role import PrefillRole
from ..transfer.channels import BeatThread
from ..transfer.keys import ClusterKeys
from ..worker.calibration import calibrate
from ..worker.membership import Membership
from ..worker.role import WorkerRole
from ..worker.workbench import build_workbench
from ..worker.worker import Worker

logger = logging.getLogger(__name__)


def run_worker(config: WorkerConfig) -> None:
    """Load, join, serve until told to stop. Raises ConfigurationError for what cannot be done."""
    bench = build_workbench(config)
    membership = Membership()
    roles: dict[Role, WorkerRole] = {
        Role.PREFILL: PrefillRole(bench, membership),
        Role.DECODE: DecodeRole(bench, membership),
    }
    worker = Worker(bench, membership, roles)
    _on_signals(worker)
    calibrate(bench)
    keys = ClusterKeys.load(config.network.key_file)
    beat = BeatThread(config.network, bench.info.ref, keys, lambda: bench.engine.runner.num_steps)
    beat.start()
    try:
        logger.debug("ready: %d blocks of %d tokens", bench.info.num_blocks, bench.info.block_size)
        worker.run()
    finally:
        beat.stop()
        bench.link.close()
        bench.channels.close()


def _on_signals(worker: Worker) -> None:
    """The first SIGTERM or SIGINT drains, the next one ends the process at once."""

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        logger.info("draining")
        worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
