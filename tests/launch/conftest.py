"""Makes the plain helper modules of this folder importable as fixtures."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def builders() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launch_builders", Path(__file__).with_name("launch_builders.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
