"""Random requests made from /openapi.json, on a real server; scripts/fuzz_api.py is the same with thousands."""

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
        fuzz.run(420, first_seed=1)
        server.wait_idle()
    told = "\n".join(fuzzing.report(fuzz))
    assert not fuzz.faults, told
    for path in ("completions", "chat/completions", "responses", "messages", "batches"):
        fitting = {
            status: n for (label, fits, status), n in fuzz.statuses.items() if fits and label == f"POST /v1/{path}"
        }
        assert fitting[200] >= 0.2 * sum(fitting.values()), f"hardly any request to {path} is answered:\n{told}"
