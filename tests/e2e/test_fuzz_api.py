"""Random requests made from /openapi.json, on a real server; scripts/fuzz_api.py is the same with thousands."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_no_answer_is_a_5xx_or_off_its_schema(
    serve: Callable[..., AbstractContextManager[Any]], tiny_model: Path, fuzzing: ModuleType
) -> None:
    with serve(tiny_model, "--prefill", "1", "--decode", "1") as server:
        fuzz = fuzzing.Fuzz(server.url)
        fuzz.run(300, first_seed=1)
        server.wait_idle()
    told = "\n".join(fuzzing.report(fuzz))
    assert not fuzz.faults, told
    answered: Counter[str] = Counter()
    for (label, status), count in fuzz.statuses.items():
        answered[label] += count if status == 200 else 0
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert answered[f"POST {path}"] > 0, f"{path} was never asked for something it gives:\n{told}"
