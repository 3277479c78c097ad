"""Fixtures of the gateway's tests."""

import asyncio
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from baton.vocab.tokenizer import Tokenizer

ANSWER = "Grüße, 世界! Baton runs 🏃 and stops."


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def world_module() -> ModuleType:
    """tests/gateway/gateway_world.py (test folders cannot be imported under --import-mode=importlib)."""
    return _load("gateway_world")


@pytest.fixture(scope="session")
def hand_module(world_module: ModuleType) -> ModuleType:
    """tests/gateway/hand_driven.py."""
    return _load("hand_driven")


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture(scope="session")
def answer(tokenizer: Tokenizer) -> list[int]:
    """What fake workers say: ANSWER and the end-of-sequence token."""
    return [*tokenizer.encode(ANSWER), *tokenizer.eos_token_ids]


@pytest.fixture
def in_world(world_module: ModuleType, tiny_model: Path, answer: list[int]) -> Callable[..., None]:
    """Runs `scenario(world)` against a gateway; keyword arguments are fields of its GatewayConfig."""

    def run(scenario: Callable[[Any], Awaitable[None]], **changes: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(60), world_module.open_world(tiny_model, answer, **changes) as world:
                await scenario(world)

        asyncio.run(main())

    return run
