"""Makes the plain helper modules of this folder available as fixtures."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def _load_helper(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def builders() -> ModuleType:
    return _load_helper("launch_builders")


@pytest.fixture(scope="session")
def server_process() -> ModuleType:
    return _load_helper("server_process")
