"""Fixtures shared by all rooms."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def _load_helper(name: str) -> ModuleType:
    """A plain helper module beside this file (with --import-mode=importlib the tests folder is not importable)."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer random Llama with its tokenizer (see tiny_model.py). Read only: shared by all tests."""
    return _load_helper("tiny_model").write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")
