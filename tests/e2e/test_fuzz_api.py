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
        fuzz.run(300, first_seed=1)
        server.wait_idle()
    told = "\n".join(fuzzing.report(fuzz))
    assert not fuzz.faults, told
    answered = sum(n for (label, status), n in fuzz.statuses.items() if status == 200 and label.startswith("POST /v1/"))
    assert answered >= 8, f"hardly anything was asked for that is given:\n{told}"
