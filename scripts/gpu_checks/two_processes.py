"""Prefill and decode as two processes on one card: tokens, what the hand-over costs, and a death in the middle."""

import asyncio
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.core.config import EngineConfig, NetworkConfig, SchedulerConfig, TransferConfig, WorkerConfig
from baton.core.messages import Role, Status
from baton.core.timeline import Station
from baton.launch.gpus import list_gpus

from .fleet import Answer, Fleet, join_address, key_file, renamed
from .package import has_stand_in, model_files
from .report import Report, Row

EXPOSED_GOAL = 0.04  # of TTFT
KILLED, DECODE_AFTER = "prefill killed", "decode after that"
STAGE_TIMEOUT_S = 150.0


@dataclass(frozen=True)
class Sizes:
    prompts: tuple[int, ...] = (1024, 8192)
    repeats: int = 3
    output: int = 16
    warm_up: int = 4  # tokens
    long_prompt: int = 12000  # during whose hand-over the prefill worker dies
    budget: int = 8192
    pool_tokens: int = 65536
    answer_timeout_s: float = 30.0


TINY = Sizes(
    prompts=(9,), repeats=1, output=2, warm_up=1, long_prompt=30, budget=6, pool_tokens=160, answer_timeout_s=60.0
)


@dataclass(frozen=True)
class HandOverPath:
    """Which model's KV goes from worker to worker, and how."""

    model: str
    asked: str
    used: str

    @property
    def is_as_asked(self) -> bool:
        return self.used == self.asked


class TwoProcesses:
    def __init__(self, report: Report, device: str, *, is_tiny: bool):
        self._report = report
        self._device = device
        self._is_tiny = is_tiny
        self._sizes = TINY if is_tiny else Sizes()

    @property
    def transports(self) -> tuple[str, ...]:
        return ("shared_memory", "tcp") if self._device == "cpu" else ("cuda_ipc", "pinned_memory")

    def goals(self, model: str, transport: str, *, with_death: bool) -> list[tuple[str, str]]:
        """What `run` judges, if the machine allows the transport that was asked for."""
        names = [label(n) for n in self._sizes.prompts for label in (_tokens_label, _hand_over_label)]
        names += [KILLED, DECODE_AFTER] if with_death else []
        return [("two procs", f"{model}, {transport}: {name}") for name in names]

    def run(self, model: str, transport: str, *, with_death: bool) -> None:
        """One fleet over one transport; `with_death`: at its end the prefill worker is killed while it hands over."""
        with _run_directory() as run_dir:
            folder = model_files(run_dir / "model", model, is_tiny=self._is_tiny)
            configs = [self._config(run_dir, folder, role, transport) for role in (Role.PREFILL, Role.DECODE)]
            run = self._run(model, transport, Fleet(run_dir, configs, _keep_quiet), with_death)
            asyncio.run(asyncio.wait_for(run, min(STAGE_TIMEOUT_S, self._report.seconds_left)))

    def _config(self, run_dir: Path, folder: Path, role: Role, transport: str) -> WorkerConfig:
        sizes, on_gpu = self._sizes, self._device == "cuda"
        gpu = next(iter(list_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")).gpus), None) if on_gpu else None
        engine = EngineConfig(
            model_folder=str(folder),
            device=self._device,
            kernels="triton",
            dtype="bfloat16" if on_gpu else "float32",
            block_size=16 if on_gpu else 4,
            num_blocks=0 if on_gpu else sizes.pool_tokens // 4,
            threads=1,
            max_batch=8 if on_gpu and role is Role.DECODE else 0,
            device_memory_share=0.45,
            token_budget=sizes.budget,
            ring_bytes=256 << 20,
        )
        config = WorkerConfig(
            worker_id="",
            roles=(),
            served_model="gpu_check",
            model_digest="gpu_check",
            context_length=16384,
            engine=engine,
            # The same chunks on both: their matrix products then have the same number of rows, and the same bits.
            prefill=SchedulerConfig(sizes.budget, sizes.budget, max_running=8),
            decode=SchedulerConfig(sizes.budget, sizes.budget, max_running=8),
            transfer=TransferConfig(transport, lease_s=10.0),
            network=NetworkConfig(str(run_dir), "127.0.0.1", (join_address(run_dir),), str(key_file(run_dir))),
            context_may_shrink=True,
            device_uuid=gpu.uuid if gpu else ("0" if on_gpu else ""),
            device_name=gpu.name if gpu else "",
            log_level="warning",
        )
        return renamed(config, f"{role}-0", role)

    async def _run(self, model: str, transport: str, fleet: Fleet, with_death: bool) -> None:
        async with fleet:
            await fleet.ready()
            path = HandOverPath(model, transport, await self._transport_in_use(fleet))
            note = "as asked" if path.is_as_asked else "this machine refuses what was asked for: not judged"
            self._row(path, "transport", path.used, note, None, {})
            prompts = {n: self._prompt(n) for n in (*self._sizes.prompts, self._sizes.long_prompt)}
            for num_tokens in self._sizes.prompts:
                await self._measure(path, fleet, prompts[num_tokens])
            if with_death:
                await self._death(path, fleet, prompts[self._sizes.long_prompt])

    async def _transport_in_use(self, fleet: Fleet) -> str:
        """After a first hand-over, which makes the ring and compiles what is left to compile."""
        for through_prefill in (True, False):
            answer = fleet.generate(
                self._prompt(self._sizes.prompts[0]), self._sizes.warm_up, through_prefill=through_prefill
            )
            await fleet.finish(answer, 120.0)
        await fleet.until(lambda: self._status(fleet).transports, 10.0, "the name of the transport")
        return next(iter(self._status(fleet).transports.values()))

    async def _measure(self, path: HandOverPath, fleet: Fleet, prompt: list[int]) -> None:
        """One prompt at a time, through both workers and through decode alone."""
        sizes = self._sizes
        here = [await self._answer(fleet, prompt, through_prefill=False) for _ in range(sizes.repeats)]
        there = [await self._answer(fleet, prompt, through_prefill=True) for _ in range(sizes.repeats)]
        equal = all(a.token_ids == here[0].token_ids for a in (*here, *there))
        self._row(path, _tokens_label(len(prompt)), "equal" if equal else "differ", "", equal, {})
        label = _hand_over_label(len(prompt))
        if self._is_tiny:
            self._row(path, label, "runs, not timed", "", None, {})
            return
        ttft = statistics.median(a.ttft for a in there)
        exposed = statistics.median(a.between(Station.PREFILL_COMPUTED, Station.HANDED_OVER) for a in there)
        copied = statistics.median(a.timeline.copy_ns / 1e9 for a in there)
        local = statistics.median(a.ttft for a in here)
        data: dict[str, object] = {"ttft_s": ttft, "ttft_local_s": local, "exposed_s": exposed, "copy_s": copied}
        data["checksums"] = "stand-in" if has_stand_in() else "xxh3"
        value = f"{exposed / ttft:.1%} of TTFT exposed"
        beside = f"{exposed * 1e3:.2f} of {ttft * 1e3:.1f} ms (alone {local * 1e3:.1f})"
        ok = exposed / ttft <= EXPOSED_GOAL if path.is_as_asked else None
        self._row(path, label, value, beside, ok, data)

    async def _death(self, path: HandOverPath, fleet: Fleet, prompt: list[int]) -> None:
        """SIGKILL once the first pieces have arrived: the answer is that of decode alone, and decode goes on."""
        want = await self._answer(fleet, prompt, through_prefill=False)
        before = self._status(fleet).num_kv_bytes_received
        answer = fleet.generate(prompt, self._sizes.output, through_prefill=True)

        def has_begun() -> bool:
            return answer.done.is_set() or self._status(fleet).num_kv_bytes_received > before

        await fleet.until(has_begun, self._sizes.answer_timeout_s, "the first piece")
        killed_ns = time.monotonic_ns()
        fleet.kill(Role.PREFILL)
        await fleet.finish(answer, self._sizes.answer_timeout_s)
        equal = answer.token_ids == want.token_ids
        # Killed in time, decode computes the rest itself and stamps that; otherwise the commit came before the death.
        in_time = answer.timeline.stamps[Station.HANDED_OVER] > killed_ns
        when = "in the middle" if in_time else "not judged: too late, the hand-over had ended"
        ok = equal if in_time or not equal else None
        self._row(path, KILLED, "tokens equal" if equal else "tokens differ", when, ok, {"in_time": in_time})
        again = await self._answer(fleet, prompt[: self._sizes.prompts[0]], through_prefill=False)
        alive = len(again.token_ids) == self._sizes.output
        self._row(path, DECODE_AFTER, "serves" if alive else "does not serve", "", alive, {})

    async def _answer(self, fleet: Fleet, prompt: list[int], *, through_prefill: bool) -> Answer:
        answer = fleet.generate(prompt, self._sizes.output, through_prefill=through_prefill)
        return await fleet.finish(answer, self._sizes.answer_timeout_s)

    def _status(self, fleet: Fleet) -> Status:
        status = fleet.entry(Role.DECODE).status
        assert status is not None
        return status

    def _prompt(self, num_tokens: int) -> list[int]:
        generator = random.Random(num_tokens)
        return [generator.randrange(101 if self._is_tiny else 100_000) for _ in range(num_tokens)]

    def _row(
        self, path: HandOverPath, name: str, value: str, beside: str, ok: bool | None, data: dict[str, object]
    ) -> None:
        """What is wrong is wrong over any transport; what is right speaks for the one that was asked for only."""
        if ok and not path.is_as_asked:
            ok = None
        used = "" if path.is_as_asked else f"over {path.used}"
        data = {"model": path.model, "asked": path.asked, "transport": path.used, **data}
        beside = ", ".join(part for part in (used, beside) if part)
        self._report.add(Row("two procs", f"{path.model}, {path.asked}: {name}", value, beside, ok, data))


def _tokens_label(num_tokens: int) -> str:
    return f"{num_tokens:,} tokens: tokens of both ways"


def _hand_over_label(num_tokens: int) -> str:
    return f"{num_tokens:,} tokens: hand-over"


@contextmanager
def _run_directory() -> Iterator[Path]:
    """In shared memory where there is some: rings of the host are files in it."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="gpu-check-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _keep_quiet(line: str) -> None:
    """The last lines of each worker are kept by its ChildProcess and shown when it ends."""
    del line
