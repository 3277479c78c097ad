"""The longest request of a worker whose pool is known only when its model is loaded."""

import pytest

from baton.core.config import EngineConfig, NetworkConfig, SchedulerConfig, TransferConfig, WorkerConfig
from baton.core.errors import ConfigurationError
from baton.core.messages import Role
from baton.worker.workbench import fit_context


def config(*, may_shrink: bool) -> WorkerConfig:
    engine = EngineConfig("/models/tiny", "cuda", "triton", "bfloat16", 16, 0, 1)
    network = NetworkConfig("", "127.0.0.1", (), "/keys")
    scheduler = SchedulerConfig(1, 1, 1)
    return WorkerConfig(
        "decode-0",
        (Role.DECODE,),
        "tiny",
        "d",
        8192,
        engine,
        scheduler,
        scheduler,
        TransferConfig(),
        network,
        may_shrink,
    )


def test_a_context_that_nobody_asked_for_shrinks_to_the_pool():
    assert fit_context(config(may_shrink=True), 4096) == 4096
    assert fit_context(config(may_shrink=True), 100_000) == 8192


def test_one_that_was_asked_for_is_had_or_refused():
    assert fit_context(config(may_shrink=False), 8192) == 8192
    with pytest.raises(ConfigurationError, match=r"--context-length 8192 .* decode-0 holds \(8191 tokens\)"):
        fit_context(config(may_shrink=False), 8191)
