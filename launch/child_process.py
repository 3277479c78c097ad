"""One child of the launcher: start it, copy its output with a prefix, stop it. Restarts are decided elsewhere."""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable

import msgspec

from ..core.config import GatewayConfig, WorkerConfig

_TAIL_LINES = 5
_OUTPUT_BYTES = 64 * 1024


class ChildSpec(msgspec.Struct, frozen=True):
    """What to start: `command`, to which the descriptor of the config pipe is added as the last argument."""

    name: str
    config: GatewayConfig | WorkerConfig
    command: tuple[str, ...]

    @property
    def is_gateway(self) -> bool:
        return isinstance(self.config, GatewayConfig)

    @property
    def environment(self) -> dict[str, str]:
        """torch and CUDA read these while they start, so they must be set before the process does.

        A worker sees its own card and no other, by UUID: indices may mean other cards to other programs. On the CPU it
        sees none, so that nothing there takes memory of a card.

        Passive waiting: with two threads a spinning barrier keeps the core that the gateway, or the other thread, needs
        to get there (1.7 times the throughput of a colocated worker on 2 cores, docs/performance.md).
        """
        if isinstance(self.config, GatewayConfig):
            return dict(os.environ)
        threads = str(self.config.engine.threads)
        return {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "passive",
            "CUDA_VISIBLE_DEVICES": self.config.device_uuid,
        }


def child_spec(config: GatewayConfig | WorkerConfig) -> ChildSpec:
    """The process that `launch/child.py` builds from `config`."""
    name, kind = (
        (config.gateway_id.removesuffix("-0"), "gateway")
        if isinstance(config, GatewayConfig)
        else (config.worker_id, "worker")
    )
    # -P: the working directory of the user must not shadow any module.
    return ChildSpec(name, config, (sys.executable, "-P", "-m", "baton.launch.child", kind, name))


class ChildProcess:
    """One life of one child. Its config pipe closes with this process, and the child ends with the pipe."""

    def __init__(self, spec: ChildSpec, write_line: Callable[[str], None]):
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._write_line = write_line
        self._process: asyncio.subprocess.Process | None = None
        self._pipe = -1

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """In a session of its own: the terminal's Ctrl-C reaches the launcher only, which then drains in order."""
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                str(read_end),
                pass_fds=(read_end,),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self.spec.environment,
                start_new_session=True,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        self._pipe = write_end
        with contextlib.suppress(BrokenPipeError):  # it died at once: `wait` tells
            os.write(write_end, msgspec.json.encode(self.spec.config) + b"\n")

    async def wait(self) -> int:
        """Copy the output until the child is gone; return its exit code, negative for a signal."""
        assert self._process is not None, "not started"
        try:
            await self._copy_output()
            return await self._process.wait()
        finally:
            os.close(self._pipe)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _copy_output(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        rest = b""
        # Not readline: a line without an end must neither raise nor fill the memory.
        while part := await self._process.stdout.read(_OUTPUT_BYTES):
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > _OUTPUT_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._emit(line)
        if rest:
            self._emit(rest)

    def _emit(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self.tail.append(text)
        self._write_line(f"{self.spec.name} | {text}")
