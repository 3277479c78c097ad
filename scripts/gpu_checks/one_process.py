"""A whole model in one process: speed against the floors, graphs against none, a request alone against in a batch."""

import gc
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from baton.core.config import EngineConfig
from baton.engine.engine import Engine, load_engine
from baton.engine.measuring.limits import DeviceLimits

from .decoding import Sequences, StepTimes, busy_part, device_intervals
from .package import model_files
from .report import Report, Row

SMALL, LARGE = "Qwen3-0.6B", "Llama-3.1-8B"
CONTEXT, BATCHES, PROMPTS, BUDGET = 1024, (1, 8, 64, 256), (1024, 8192), 8192
TINY_CONTEXT, TINY_BATCHES, TINY_PROMPTS, TINY_BUDGET = 8, (2,), (5,), 64
DECODE_GOALS = {(LARGE, 1): 0.70, (LARGE, 256): 0.60}
LONGEST_PAUSE_US = 20.0
SAME_GRAPHS = "graphs against none, deterministic"
SAME_TOKENS = "tokens alone against in a batch"
SAME_HIDDEN = "hidden state alone against in a batch"


class OneProcess:
    """The models live in a temporary folder; engines are loaded one after the other."""

    def __init__(self, report: Report, device: torch.device, *, is_tiny: bool):
        self._report = report
        self.device = device
        self.limits: DeviceLimits | None = None  # measured before `speed`; a dry run has none and times nothing
        self._is_tiny = is_tiny
        self._context = TINY_CONTEXT if is_tiny else CONTEXT
        self._batches = TINY_BATCHES if is_tiny else BATCHES
        self._prompts = TINY_PROMPTS if is_tiny else PROMPTS

    def load(self, folder: Path, *, max_batch: int, deterministic: bool = False, tokens: int = 0) -> Engine:
        """`tokens`: room in the pool."""
        layers_bytes = 0 if self._is_tiny else tokens * _bytes_per_token(folder)
        return load_engine(
            EngineConfig(
                model_folder=str(folder),
                device=self.device.type,
                kernels="triton",
                dtype="float32" if self._is_tiny else "bfloat16",
                block_size=16,
                num_blocks=16 if self._is_tiny else 0,
                threads=1,
                deterministic=deterministic,
                max_batch=max_batch,
                device_memory_share=0.9,
                kv_bytes=layers_bytes,
                token_budget=TINY_BUDGET if self._is_tiny else BUDGET,
            )
        )

    # ---- speed -----------------------------------------------------------------------------------------------

    def speed_goals(self, name: str) -> list[tuple[str, str]]:
        goals = [self._decode_label(batch) for batch in self._batches if (name, batch) in DECODE_GOALS]
        goals += [_pause_label(batch) for batch in self._batches]
        return [("one process", f"{name}: {goal}") for goal in goals]

    def _decode_label(self, batch: int) -> str:
        return f"decode {batch} x {self._context}"

    def speed(self, name: str) -> None:
        """Decode at 1k context and prefill, with graphs; the cache holds random numbers, since speed asks no more."""
        with tempfile.TemporaryDirectory() as base:
            folder = model_files(Path(base) / "model", name, is_tiny=self._is_tiny)
            started = time.perf_counter()
            engine = self.load(folder, max_batch=self._batches[-1], tokens=(self._context + 64) * self._batches[-1])
            took = "not timed" if self._is_tiny else f"{time.perf_counter() - started:.1f} s"
            self._add(name, "load, measure, capture", took, engine.memory_note)
            for layer in engine.pool.layers:
                layer.normal_()
            for batch in self._batches:
                self._decode_speed(name, engine, batch)
            for num_tokens in self._prompts:
                self._prefill_speed(name, engine, num_tokens)
        del engine
        self.free()

    def _decode_speed(self, name: str, engine: Engine, batch: int) -> None:
        sequences = Sequences(engine, [self._context + 40] * batch)
        sequences.computed = [self._context - 1] * batch
        sequences.decode(1 if self._is_tiny else 4)
        _, times = sequences.decode(2 if self._is_tiny else 24)
        if self.limits is None:
            self._row(name, self._decode_label(batch), "runs, not timed", "", None, {})
        else:
            self._judge_decode(name, engine, batch, times, self.limits)
        self._gaps(name, sequences, batch, statistics.median(times.host))

    def _judge_decode(self, name: str, engine: Engine, batch: int, times: StepTimes, limits: DeviceLimits) -> None:
        step = statistics.median(times.wall)
        kv_bytes = batch * self._context * engine.layout.bytes_per_token
        floor = (_weight_bytes(engine) + kv_bytes) / limits.bytes_per_second
        goal = DECODE_GOALS.get((name, batch), 0.0)
        fraction = floor / step
        data = {"model": name, "batch": batch, "step_s": step, "floor_s": floor, "fraction": fraction, "goal": goal}
        data["host_s"] = statistics.median(times.host)
        beside = f"{step * 1e3:.3f} ms, {batch / step:,.0f} tok/s" + (f", goal {goal:.0%}" if goal else "")
        ok = fraction >= goal if goal else None
        self._row(name, self._decode_label(batch), f"{fraction:.1%} of bandwidth", beside, ok, data)

    def _gaps(self, name: str, sequences: Sequences, batch: int, host_s: float) -> None:
        """Whether the device waits for the host between decode steps."""
        intervals = device_intervals(lambda: sequences.decode(1 if self._is_tiny else 8), self.device)
        if not intervals or self._is_tiny:
            self._row(name, _pause_label(batch), "no profile" if not intervals else "not timed", "", None, {})
            return
        busy, longest = busy_part(intervals)
        beside = f"longest pause {longest:.1f} us, host {host_s * 1e3:.2f} ms"
        data: dict[str, object] = {"busy": busy, "longest_pause_us": longest}
        self._row(name, _pause_label(batch), f"{busy:.1%} busy", beside, longest <= LONGEST_PAUSE_US, data)

    def _prefill_speed(self, name: str, engine: Engine, num_tokens: int) -> None:
        sequences, generator = Sequences(engine, [num_tokens]), random.Random(1)
        seconds = []
        for _ in range(1 if self._is_tiny else 5):
            prompt = [generator.randrange(engine.model_config.vocab_size) for _ in range(num_tokens)]
            start = time.perf_counter()
            sequences.prefill([prompt], BUDGET)
            seconds.append(time.perf_counter() - start)
        label = f"prefill {num_tokens:,} to first token"
        if self.limits is None:
            self._row(name, label, "runs, not timed", "", None, {})
            return
        best = min(seconds)
        config = engine.model_config
        heads = config.num_layers * config.num_heads * config.head_dim
        flops = 2 * num_tokens * _layer_weights(engine) + 2 * heads * num_tokens * (num_tokens + 1)
        rate = flops / best
        fraction = rate / self.limits.flops_per_second["bfloat16"]
        data = {"model": name, "tokens": num_tokens, "seconds": seconds, "flops": flops, "fraction": fraction}
        beside = f"{best * 1e3:.2f} ms, {rate / 1e12:.0f} TFLOP/s"
        self._row(name, label, f"{fraction:.1%} of matrix rate", beside, None, data)

    # ---- sameness --------------------------------------------------------------------------------------------

    def sameness_goals(self, name: str) -> list[tuple[str, str]]:
        return [("one process", f"{name}: {goal}") for goal in (SAME_GRAPHS, SAME_TOKENS, SAME_HIDDEN)]

    def sameness(self, name: str) -> None:
        """Greedy tokens with and without graphs; with --deterministic also alone and in a batch, bit for bit."""
        generator = random.Random(2)
        lengths = (3, 4, 6) if self._is_tiny else (5, 123, 700, 64, 257)
        vocab_size = 101 if self._is_tiny else 100_000
        prompts = [[generator.randrange(vocab_size) for _ in range(n)] for n in lengths]
        with tempfile.TemporaryDirectory() as base:
            folder = model_files(Path(base) / "model", name, is_tiny=self._is_tiny)
            for deterministic in (False, True):
                label = SAME_GRAPHS if deterministic else "graphs against none, torch's products"
                with_graphs = self.load(folder, max_batch=8, deterministic=deterministic, tokens=16384)
                tokens = self._generate(with_graphs, prompts)
                if deterministic:
                    self._alone(name, with_graphs, prompts, tokens)
                del with_graphs
                self.free()
                without = self.load(folder, max_batch=0, deterministic=deterministic, tokens=16384)
                other = self._generate(without, prompts)
                del without
                self.free()
                equal = sum(a == b for a, b in zip(tokens, other, strict=True))
                # Padding to a bucket changes the number of rows that cuBLAS sees, and so its sums.
                ok = equal == len(prompts) if deterministic else None
                self._row(name, label, f"{equal} of {len(prompts)} equal", "", ok, {})

    def _generate(self, engine: Engine, prompts: list[list[int]]) -> list[list[int | None]]:
        num_steps = 1 if self._is_tiny else 32
        sequences = Sequences(engine, [len(p) + num_steps + 1 for p in prompts])
        first = sequences.prefill(prompts, 64)
        return [[one, *more] for one, more in zip(first, sequences.decode(num_steps)[0], strict=True)]

    def _alone(self, name: str, engine: Engine, prompts: list[list[int]], want: list[list[int | None]]) -> None:
        count = 1 if self._is_tiny else 2
        alone = [self._generate(engine, [prompt])[0] for prompt in prompts[:count]]
        same = alone == want[:count]
        self._row(name, SAME_TOKENS, "equal" if same else "differ", "", same, {})
        by_itself = Sequences(engine, [len(prompts[1])], seed=1).hidden_of(prompts[1])
        others = [prompts[0], prompts[2]]
        beside = Sequences(engine, [len(p) for p in (prompts[1], *others)], seed=2).hidden_of(prompts[1], others)
        equal = torch.equal(by_itself, beside)
        self._row(name, SAME_HIDDEN, "same bits" if equal else "differs", "", equal, {})

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _add(self, model: str, name: str, value: str, note: str) -> None:
        self._row(model, name, value, note.replace("\n", "; ").removeprefix("memory: "), None, {"note": note})

    def _row(self, model: str, name: str, value: str, beside: str, ok: bool | None, data: dict[str, object]) -> None:
        self._report.add(Row("one process", f"{model}: {name}", value, beside, ok, data))

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _pause_label(batch: int) -> str:
    return f"decode {batch}: device between steps"


def _layer_weights(engine: Engine) -> int:
    config = engine.model_config
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = (qkv + config.num_heads * config.head_dim) * config.hidden_size
    return config.num_layers * (attention + 3 * config.intermediate_size * config.hidden_size)


def _weight_bytes(engine: Engine) -> int:
    """Read by a decode step: all matrices and the head, not the embedding."""
    config = engine.model_config
    return (_layer_weights(engine) + config.vocab_size * config.hidden_size) * engine.layout.item_size


def _bytes_per_token(folder: Path) -> int:
    from baton.engine.dtypes import kv_layout
    from baton.vocab.model_config import load_model_config

    return kv_layout(load_model_config(folder), 16, "bfloat16").bytes_per_token
