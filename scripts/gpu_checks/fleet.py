"""A prefill and a decode worker as real processes, and a gateway without HTTP: Baton's own table and channel."""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from baton.core.config import WorkerConfig
from baton.core.messages import (
    GenerateRequest,
    Message,
    NodeRef,
    PrefillRequest,
    RequestFailed,
    Role,
    TokenChunk,
    TokenChunks,
    WorkerInfo,
)
from baton.core.request import Request, SamplingParams
from baton.core.timeline import Station, Timeline
from baton.gateway.cluster import Cluster
from baton.gateway.membership import Membership
from baton.gateway.membership import Worker as TableEntry
from baton.launch.child_process import ChildProcess, ChildSpec
from baton.transfer.gateway_channel import GatewayChannel
from baton.transfer.keys import ClusterKeys

from .package import ROOT

START_TIMEOUT_S = 120.0


@dataclass
class Answer:
    """What came back for one request. `timeline` is of the first token."""

    asked_ns: int = field(default_factory=time.monotonic_ns)
    token_ids: list[int] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    failure: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def between(self, first: Station, last: Station) -> float:
        """Seconds."""
        return (self.timeline.stamps[last] - self.timeline.stamps[first]) / 1e9

    @property
    def ttft(self) -> float:
        """From asking to the first token's sampling, in seconds."""
        return (self.timeline.stamps[Station.FIRST_TOKEN] - self.asked_ns) / 1e9


class Fleet:
    """Use as an async context manager. `configs` become processes; each answers as `scripts/gpu_check --worker`."""

    def __init__(self, run_dir: Path, configs: list[WorkerConfig], write_line: Callable[[str], None]):
        self._run_dir = run_dir
        self._write_line = write_line
        self._answers: dict[str, Answer] = {}
        self._count = 0
        self._killed: list[asyncio.Task[int]] = []
        self.children = {config.worker_id: self._child(config) for config in configs}

    def _child(self, config: WorkerConfig) -> ChildProcess:
        script = str(ROOT / "scripts" / "gpu_check")
        command = (sys.executable, "-P", script, "--worker", config.engine.device, config.worker_id)
        return ChildProcess(ChildSpec(config.worker_id, config, command), self._write_line)

    async def __aenter__(self) -> "Fleet":
        ref = NodeRef("gateway-0", 1)
        keys = ClusterKeys.load(key_file(self._run_dir))
        self._membership = Membership(ref, "", 30.0)
        self._channel = GatewayChannel((join_address(self._run_dir),), ref, keys)
        self._cluster = Cluster(self._channel, self._membership)
        self._cluster.listeners.append(self)
        self._loop = asyncio.create_task(self._cluster.run())
        self._ends: dict[str, asyncio.Task[int]] = {}  # of children that should live
        for name, child in self.children.items():
            await child.start()
            self._ends[name] = asyncio.create_task(child.wait())
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self.children.values():
            child.kill()
        await asyncio.wait([*self._ends.values(), *self._killed], timeout=10.0)
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        self._channel.close()

    # ---- workers ---------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """All workers have joined and know each other. Raises RuntimeError when one ends before."""
        await self.until(lambda: len(self._membership.workers) == len(self.children), START_TIMEOUT_S, "joined workers")
        await self.until(lambda: all(w.status for w in self._membership.workers.values()), 20.0, "reports of load")

    async def until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        ends = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > ends:
                raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
            for name, end in self._ends.items():
                if end.done():
                    raise RuntimeError(f"{name} ended with {end.result()}: {' / '.join(self.children[name].tail)}")
            await asyncio.sleep(0.002)

    def entry(self, role: Role) -> TableEntry:
        """The table's entry of the one worker with this role."""
        return self._membership.with_role(role)[0]

    def kill(self, role: Role) -> None:
        """SIGKILL, and the gateway hears of it as it would from its supervisor."""
        ref = self.entry(role).info.ref
        self._killed.append(self._ends.pop(ref.node_id))
        self.children[ref.node_id].kill()
        self._cluster._apply(self._membership.unreachable(ref, "it was killed"))

    # ---- requests --------------------------------------------------------------------------------------------

    def generate(self, prompt: list[int], max_tokens: int, *, through_prefill: bool) -> Answer:
        """Ask for greedy tokens. Each request has a cache namespace of its own, so nothing is found cached."""
        self._count += 1
        name = f"request-{self._count}"
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        prefill = self.entry(Role.PREFILL).info.ref if through_prefill else None
        answer = self._answers[name] = Answer()
        request = Request(name, name, prompt, sampling)
        decode = self.entry(Role.DECODE).info.ref
        self._cluster.send(decode, GenerateRequest(request, prefill))
        if prefill is not None:
            self._cluster.send(prefill, PrefillRequest(name, name, prompt, decode))
        return answer

    async def finish(self, answer: Answer, timeout_s: float) -> Answer:
        await self.until(answer.done.is_set, timeout_s, "an answer")
        if answer.failure:
            raise RuntimeError(answer.failure)
        return answer

    # ---- what the cluster tells its listener -----------------------------------------------------------------

    def worker_joined(self, info: WorkerInfo) -> None:
        pass

    def worker_left(self, info: WorkerInfo) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    def handle(self, sender: NodeRef, body: Message) -> None:
        match body:
            case TokenChunks(chunks=chunks):
                for chunk in chunks:
                    self.handle(sender, chunk)
            case TokenChunk() as chunk:
                answer = self._answers[chunk.request_id]
                answer.token_ids += chunk.token_ids
                if chunk.timeline is not None:
                    answer.timeline = chunk.timeline
                if chunk.finish_reason is not None:
                    answer.done.set()
            case RequestFailed(request_id=request_id, message=message):
                answer = self._answers[request_id]
                answer.failure = message
                answer.done.set()


def key_file(run_dir: Path) -> Path:
    path = run_dir / "keys"
    if not path.exists():
        ClusterKeys.create(path)
    return path


def join_address(run_dir: Path) -> str:
    return f"ipc://{run_dir}/gateway.sock"


def renamed(config: WorkerConfig, worker_id: str, role: Role) -> WorkerConfig:
    return msgspec.structs.replace(config, worker_id=worker_id, roles=(role,))
