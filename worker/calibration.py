"""Calibration: a worker measures steps of its own before it joins, so that its cost is known from its first Status on.

The steps are those of its roles in all that takes time (the batch is built, computed, and its tokens are sampled), on
blocks that are given back: nothing of them reaches the radix tree, a ledger or a counter.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ..core.config import WorkerConfig
from ..core.request import SamplingParams
from ..core.step_cost import StepCost, StepShape
from ..engine.forward_batch import Chunk, build_forward_batch
from ..engine.launched import LaunchedTokens, LayerProgress
from ..engine.sampler import SamplingRow
from .trials import SLOW_S, Trial, TrialLimits, is_over, is_worth_its_time, trials, warmups
from .workbench import Workbench

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Running:
    shape: StepShape
    launched_at: float
    hidden: Tensor
    tokens: LaunchedTokens | None
    progress: LayerProgress


def limits_of(config: WorkerConfig, num_blocks: int, context_length: int) -> TrialLimits:
    """A GPU's memory was measured with the largest step, and its decodes have graphs, as its config says."""
    on_gpu = config.engine.device == "cuda"
    token_budget = max(config.prefill.token_budget, config.decode.token_budget)
    return TrialLimits(
        token_budget=config.engine.token_budget if on_gpu else token_budget,
        max_batch=config.engine.max_batch if on_gpu else config.decode.max_running,
        context_length=context_length,
        num_blocks=num_blocks,
        block_size=config.engine.block_size,
    )


def calibrate(bench: Workbench, clock: Callable[[], float] = time.monotonic) -> None:
    """Let `bench.steps` learn from trials, for a second or two. No step of a request may be running.

    What does not fit into the pool is not tried; what is then not known is learned from requests.
    """
    began = clock()
    limits = limits_of(bench.config, bench.info.num_blocks, bench.info.context_length)
    with _scratch_blocks(bench, limits) as block_ids:
        steps = _TrialSteps(bench, block_ids, clock)
        smallest = warmups(limits)
        for trial in smallest:
            steps.run(trial)
        warm_at = clock()
        for trial in smallest:
            steps.run(trial, bench.steps.tried)
        steps.finish()
        if clock() - warm_at > SLOW_S:
            logger.debug("steps are too slow to be measured before there are requests")
            return
        for trial in trials(limits):
            cost = bench.steps.cost
            if is_over(clock() - began, cost, limits):
                break
            if is_worth_its_time(trial, cost):
                if bench.engine.overlaps:  # a device whose kernels are compiled, or tuned, when a shape comes first
                    steps.run(trial)
                steps.run(trial, bench.steps.tried)
        steps.finish()
    if (learned := bench.steps.learned) is not None:
        logger.info("%s", in_words(learned, clock() - began))


def in_words(cost: StepCost, elapsed_s: float) -> str:
    """For the start lines."""
    terms = [_in_ms(cost.base_s), f"{_in_ms(cost.per_prompt_token_s)} a prompt token"]
    if cost.knows_decodes:
        terms += [
            f"{_in_ms(cost.per_decode_s)} a sequence",
            f"{_in_ms(1000 * cost.per_context_s)} per 1,000 of its tokens",
        ]
    return f"a step takes {' + '.join(terms)} (measured in {elapsed_s:.1f} s)"


def _in_ms(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms"


@contextmanager
def _scratch_blocks(bench: Workbench, limits: TrialLimits) -> Iterator[Sequence[int]]:
    """Blocks for the trials; at the end everything is as if there had been none."""
    block_ids = bench.cache.allocate(min(limits.num_scratch_blocks, bench.cache.num_available))
    try:
        yield block_ids
    finally:
        bench.cache.pool.free(block_ids)
        bench.engine.runner.start_counting()


class _TrialSteps:
    """Runs trials as the roles run their steps: where the device overlaps, one is launched behind the one that runs.

    A step takes what StepWatch says: from its launch, or from the end of the step before it, to its own end.
    """

    def __init__(self, bench: Workbench, block_ids: Sequence[int], clock: Callable[[], float]):
        self._bench = bench
        self._block_ids = block_ids
        self._clock = clock
        self._free_at = -math.inf
        self._running: tuple[_Running, Callable[[StepShape, float], None] | None] | None = None

    def run(self, trial: Trial, tell: Callable[[StepShape, float], None] | None = None) -> None:
        """`tell` gets the shape and the seconds, when they are known."""
        launched = self._launch(trial)
        self.finish()
        self._running = launched, tell
        if not self._bench.engine.overlaps:
            self.finish()

    def finish(self) -> None:
        """Wait for the step that runs."""
        if self._running is None:
            return
        (step, tell), self._running = self._running, None
        step.progress.wait()
        if step.tokens is None:
            self._bench.engine.runner.to_host(step.hidden)
        else:
            step.tokens.token_ids()
        now = self._clock()
        seconds, self._free_at = now - max(step.launched_at, self._free_at), now
        if tell is not None:
            tell(step.shape, seconds)

    def _launch(self, trial: Trial) -> _Running:
        engine = self._bench.engine
        chunks = self._chunks(trial)
        launched_at = self._clock()
        hidden = engine.runner.forward(build_forward_batch(chunks, self._bench.info.block_size))
        tokens = None
        if trial.decodes:
            # Greedy: what a draw takes depends on how sure the model is, and of such a text it is not sure at all.
            rows = [SamplingRow(SamplingParams(temperature=0.0), 0, chunk.stop) for chunk in chunks]
            tokens = engine.sampler.launch(engine.runner.logits(hidden), rows)
        return _Running(trial.shape, launched_at, hidden, tokens, engine.runner.progress)

    def _chunks(self, trial: Trial) -> list[Chunk]:
        """Decodes first; each sequence on the next blocks."""
        vocab_size = self._bench.engine.model_config.vocab_size
        chunks, first, block_size = [], 0, self._bench.info.block_size
        parts = [*((context - 1, 1, True) for context in trial.decodes), *((s, n, False) for s, n in trial.prompts)]
        for start, num_tokens, is_decode in parts:
            last = first - -(start + num_tokens) // block_size
            token_ids = [(start + i) % vocab_size for i in range(num_tokens)]
            chunks.append(Chunk(token_ids, start, self._block_ids[first:last], wants_hidden=True, is_decode=is_decode))
            first = last
        return chunks
