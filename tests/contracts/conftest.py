"""Fixtures of the contract tests."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """The fakes of the transfer room (the tests folder is not importable)."""
    spec = importlib.util.spec_from_file_location(
        "link_fakes", Path(__file__).parents[1] / "transfer" / "link_fakes.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
