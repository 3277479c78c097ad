"""A batch of sequences driven through an engine as the roles drive it: launched ahead, collected one step later."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from baton.core.request import SamplingParams
from baton.engine.engine import Engine
from baton.engine.forward_batch import Chunk, build_forward_batch
from baton.engine.launched import LaunchedTokens
from baton.engine.sampler import SamplingRow

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class StepTimes:
    """Seconds, one for each step."""

    wall: list[float] = field(default_factory=list)  # from launch to launch
    host: list[float] = field(default_factory=list)  # planning and launching


class Sequences:
    """`lengths`: tokens each has room for. Blocks are scattered over the pool."""

    def __init__(self, engine: Engine, lengths: Sequence[int], seed: int = 0):
        self.engine = engine
        size, generator = engine.layout.block_size, random.Random(seed)
        free = generator.sample(range(engine.num_blocks), engine.num_blocks)
        self.tables = [[free.pop() for _ in range(-(-length // size))] for length in lengths]
        self.computed = [0] * len(lengths)

    def prefill(self, prompts: Sequence[list[int]], budget: int) -> list[int | None]:
        """Each prompt by itself, in chunks of at most `budget` tokens; returns the first new tokens."""
        first = []
        for i, prompt in enumerate(prompts):
            for start in range(0, len(prompt), budget):
                stop = min(start + budget, len(prompt))
                hidden = self._forward([Chunk(prompt[start:stop], start, self.tables[i], stop == len(prompt))])
            self.computed[i] = len(prompt)
            first += self._sample(hidden, [i]).token_ids()
        return first

    def decode(self, num_steps: int, which: Sequence[int] | None = None) -> tuple[list[list[int | None]], StepTimes]:
        """So many steps from the tokens in the feedback slots; returns the tokens of each sequence."""
        chosen = list(range(len(self.tables))) if which is None else list(which)
        tokens: list[list[int | None]] = [[] for _ in chosen]
        times, last, ahead = StepTimes(), 0.0, None
        for step in range(num_steps):
            start = time.perf_counter()
            chunks = [Chunk([0], self.computed[i], self.tables[i], True, True, i) for i in chosen]
            launched = self._sample(self._forward(chunks), chosen)
            for i in chosen:
                self.computed[i] += 1
            times.host.append(time.perf_counter() - start)
            if ahead is not None:
                _collect(tokens, ahead)
            ahead = launched
            if step:
                times.wall.append(start - last)
            last = start
        if ahead is not None:
            _collect(tokens, ahead)
        return tokens, times

    def hidden_of(self, prompt: list[int], others: Sequence[list[int]] = ()) -> torch.Tensor:
        """The last hidden state of a prompt that fits one chunk, with other prompts behind it in the same batch."""
        prompts = [prompt, *others]
        chunks = [Chunk(p, 0, table, True) for p, table in zip(prompts, self.tables, strict=False)]
        return self._forward(chunks)[0].clone()

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor:
        return self.engine.runner.forward(build_forward_batch(chunks, self.engine.layout.block_size))

    def _sample(self, hidden: torch.Tensor, which: Sequence[int]) -> LaunchedTokens:
        rows = [SamplingRow(GREEDY, 0, self.computed[i], feedback_slot=i) for i in which]
        return self.engine.sampler.launch(self.engine.runner.logits(hidden), rows)


def busy_part(intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(part of the time from the first begin to the last end that something ran, longest pause), of (begin, end)."""
    ordered = sorted(intervals)
    reached, pauses = ordered[0][0], [0.0]
    for begin, end in ordered:
        pauses.append(begin - reached)
        reached = max(reached, end)
    span = reached - ordered[0][0]
    return 1 - sum(p for p in pauses if p > 0) / span, max(pauses)


def device_intervals(work: Callable[[], object], device: torch.device) -> list[tuple[float, float]]:
    """(begin, end) in microseconds of all that the device does for `work`, in a profile."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    with torch.profiler.profile(activities=activities) as profile:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    events = (event for event in profile.events() if event.device_type == wanted)
    return [(event.time_range.start, event.time_range.end) for event in events]


def _collect(tokens: list[list[int | None]], launched: LaunchedTokens) -> None:
    for of_sequence, token in zip(tokens, launched.token_ids(), strict=True):
        of_sequence.append(token)
