"""Every feature gives the same answer whichever way: colocated or disaggregated, streamed or whole, cold or warm, alone
or eight at once. scripts/check_features.py runs all combinations; here each server sees the two that differ most.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOPOLOGIES = {"colocated": ("0", "1"), "1P1D": ("1", "1"), "2P2D": ("2", "2")}


def test_every_feature_is_the_same_everywhere(
    serve: Callable[..., AbstractContextManager[Any]], tiny_model: Path, features: ModuleType
) -> None:
    told: dict[str, dict[str, Any]] = {}
    for name, (prefill, decode) in TOPOLOGIES.items():
        flags = ("--prefill", prefill, "--decode", decode, "--dtype", "float32", "--token-budget", "32")
        flags += ("--local-prefill", "never")
        with serve(tiny_model, *flags) as server:
            told[f"{name}, cold, whole"] = features.answers(server, streamed=False, at_once=1)
            server.wait_idle()
            told[f"{name}, warm, streamed, 8 at once"] = features.answers(server, streamed=True, at_once=8)
            server.wait_idle()
            if name != "colocated":
                server.require_handed_over(num_local=2 * features.num_scored_prompts())
    expected = told["colocated, cold, whole"]
    wrong = [line for where, found in told.items() for line in features.all_differences(expected, found, where)]
    assert not wrong, "\n".join(wrong[:40])
    reasons = {choice["finish_reason"] for choice in chain.from_iterable(expected.values())}
    assert reasons == {
        "stop",
        "length",
        "tool_calls",
        "completed",
        "incomplete",
        "max_tokens",
        "stop_sequence",
        "tool_use",
    }


def test_the_comparison_sees_what_differs(features: ModuleType) -> None:
    choice = {"text": "ab", "logprobs": [["a", -1.0, {"a": -1.0}]], "calls": {0: ["f", "{}"]}, "token_ids": [1, 2]}
    assert features.differences([choice], [choice | {"logprobs": [["a", -1.001, {"a": -1.0}]]}]) == []
    for other in (
        {"text": "ac"},
        {"logprobs": [["a", -1.01, {"a": -1.0}]]},
        {"logprobs": [["a", -1.0, {"b": -1.0}]]},
        {"calls": {}},
        {"token_ids": [1]},
    ):
        assert len(features.differences([choice], [choice | other])) == 1
