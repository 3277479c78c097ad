"""Fixtures of the end-to-end tests: real servers, and the oracle script as a module."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

TESTS = Path(__file__).resolve().parent.parent


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def serving() -> ModuleType:
    return _load(TESTS / "serving.py")


@pytest.fixture(scope="session")
def serve(serving: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager]:
    """`with serve(model, *flags) as server`: see tests/serving.py."""
    return partial(serving.serve, tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def make_oracle() -> ModuleType:
    return _load(TESTS.parent / "scripts" / "make_oracle.py")


@pytest.fixture(scope="session")
def features() -> ModuleType:
    return _load(Path(__file__).with_name("features.py"))


@pytest.fixture(scope="session")
def fuzzing() -> ModuleType:
    return _load(Path(__file__).with_name("fuzz.py"))


@pytest.fixture(scope="session")
def openai_server(
    serve: Callable[..., AbstractContextManager[Any]], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """One disaggregated server for all tests of the official client."""
    folder = str(tmp_path_factory.mktemp("batches"))
    with serve(tiny_model, "--prefill", "1", "--decode", "1", "--dtype", "float32", "--batch-dir", folder) as server:
        yield server


@pytest.fixture
def openai_client(openai_server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{openai_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
