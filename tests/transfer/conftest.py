"""Fixtures of the transfer room."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """link_fakes.py beside this file (the tests folder is not importable)."""
    spec = importlib.util.spec_from_file_location("link_fakes", Path(__file__).with_name("link_fakes.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
