"""A worker measures its steps before it joins, with the real engine: then it knows its cost, nothing is left over."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.core.config import EngineConfig, NetworkConfig, SchedulerConfig, TransferConfig, WorkerConfig
from baton.core.messages import Role
from baton.core.step_cost import StepCost, StepShape, StepTotals
from baton.engine.engine import Engine, load_engine
from baton.radix_cache.cache import RadixCache
from baton.worker.calibration import calibrate, in_words
from baton.worker.sequence_blocks import SequenceBlocks
from baton.worker.step_watch import StepWatch

BLOCK_SIZE = 16


def config_of(model: Path, num_blocks: int) -> WorkerConfig:
    return WorkerConfig(
        worker_id="decode-0",
        roles=(Role.DECODE,),
        served_model="tiny",
        model_digest="",
        context_length=num_blocks * BLOCK_SIZE,
        engine=EngineConfig(str(model), "cpu", "torch", "float32", BLOCK_SIZE, num_blocks, 1),
        prefill=SchedulerConfig(128, 64, 8),
        decode=SchedulerConfig(64, 64, 8),
        transfer=TransferConfig(),
        network=NetworkConfig("", "127.0.0.1", (), ""),
    )


def bench_of(engine: Engine, config: WorkerConfig) -> SimpleNamespace:
    """What calibration uses of a Workbench: no sockets."""
    num_blocks = config.engine.num_blocks
    return SimpleNamespace(
        config=config,
        info=SimpleNamespace(num_blocks=num_blocks, block_size=BLOCK_SIZE, context_length=config.context_length),
        engine=engine,
        cache=SequenceBlocks(RadixCache(num_blocks, BLOCK_SIZE), BLOCK_SIZE).cache,
        steps=StepWatch(),
    )


def clock_of(step_s: float) -> Callable[[], float]:
    """Each look is so much later than the last one."""
    readings = itertools.count()
    return lambda: step_s * next(readings)


@pytest.mark.parametrize("num_blocks", [256, 4])
def test_the_cost_is_known_and_nothing_is_left_over(tiny_model: Path, num_blocks: int) -> None:
    config = config_of(tiny_model, num_blocks)
    engine = load_engine(config.engine)
    bench = bench_of(engine, config)
    calibrate(bench, clock_of(1e-3))  # the engine computes; what that takes on a busy machine would be a matter of luck
    cost = bench.steps.learned
    assert cost is not None
    assert cost.knows_prompts
    assert cost.knows_decodes
    assert cost.seconds(StepShape(64, 2048.0)) == pytest.approx(1e-3, rel=0.2)
    assert bench.steps.totals == StepTotals()
    assert (engine.runner.num_tokens_computed, engine.runner.num_steps) == (0, 0)
    ledger = bench.cache.ledger()
    assert (ledger.free, ledger.total) == (num_blocks, num_blocks)
    assert bench.cache.drain_events() == []
    assert bench.cache.snapshot() == []
    bench.cache.check_integrity()


def test_a_device_too_slow_for_trials_starts_without(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tiny_model, 64)
    bench = bench_of(load_engine(config.engine), config)
    with caplog.at_level(logging.DEBUG):
        calibrate(bench, clock_of(100.0))
    assert bench.steps.learned is None
    assert "too slow" in caplog.text
    assert bench.cache.ledger().free == 64


def test_the_start_line() -> None:
    cost = StepCost(0.03, 0.75e-3, 1e-7, 4e-3, 5e-6, 60, 0.1, 30, 30)
    assert in_words(cost, 1.23) == (
        "a step takes 30 ms + 0.75 ms a prompt token + 4 ms a sequence + 5 ms per 1,000 of its tokens "
        "(measured in 1.2 s)"
    )
