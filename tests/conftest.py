"""Fixtures shared by all rooms."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Triton's interpreter takes the place of its compiler for a whole process, so tests that need it have their own:
    `TRITON_INTERPRET=1 pytest tests/*/interpreted`. In any other process those folders are empty."""
    return True if collection_path.name == "interpreted" and os.environ.get("TRITON_INTERPRET") != "1" else None


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


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape as a Qwen3: queries and keys are normalised, the output matrix is the embedding."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    return _load_helper("tiny_model").write_tiny_model(folder, family="qwen3")


@pytest.fixture(scope="session")
def random_models() -> ModuleType:
    """tests/random_models.py: random models of all families, and transformers' answers."""
    return _load_helper("random_models")


@pytest.fixture(scope="session")
def save_model(random_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`save_model(family, **settings)`: a folder with a random model as transformers writes it."""

    def save(family: str, **settings: object) -> Path:
        folder: Path = random_models.save_random_model(tmp_path_factory.mktemp(family), family, **settings)
        return folder

    return save


@pytest.fixture(scope="session")
def oracle_logits(random_models: ModuleType) -> Callable[[Path, list[int]], object]:
    """`oracle_logits(folder, token_ids)`: transformers' fp32 logits, `[num_tokens, vocab_size]`."""
    logits: Callable[[Path, list[int]], object] = random_models.logits_of
    return logits
