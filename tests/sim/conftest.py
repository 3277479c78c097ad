"""A fleet whose steps can be computed by hand."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from baton.core.config import SchedulerConfig
from baton.core.step_cost import StepCost
from baton.sim.device import LinearDevice, Overheads
from baton.sim.handover import LinkSpeed
from baton.sim.simulation import FleetConfig


def make_fleet(num_prefill: int = 1, num_decode: int = 1, **changes: Any) -> FleetConfig:
    """A step takes 10 ms + 0.1 ms a prompt token + 1 ms a decode; KV 10 us a token + 1 ms; messages 1 ms."""
    limits = SchedulerConfig(token_budget=1000, chunk_size=1000, max_running=64)
    config = FleetConfig(
        num_prefill=num_prefill,
        num_decode=num_decode,
        device=LinearDevice(StepCost(0.010, 0.0001, 0.0, 0.001, 0.0)),
        overheads=Overheads(sampling_s=0.002),
        prefill=limits,
        decode=limits,
        num_blocks=1000,
        block_size=16,
        link=LinkSpeed(bytes_per_token=1000, bytes_per_s=1e8, latency_s=0.001, num_layers=1),
        message_s=0.001,
        overlaps=False,
    )
    return dataclasses.replace(config, **changes)


@pytest.fixture
def fleet() -> Callable[..., FleetConfig]:
    return make_fleet
