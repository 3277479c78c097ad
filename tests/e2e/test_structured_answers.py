"""Structured output and required tools on real servers: every answer is valid, and the same wherever it was made."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
TOPOLOGIES = [
    ("--prefill", "0", "--decode", "1"),
    ("--prefill", "1", "--decode", "1"),
    ("--prefill", "2", "--decode", "2"),
]
NAMES = ("alone", "1P1D", "2P2D")
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 3},
    {"anyOf": [{"type": "string", "format": "date"}, {"type": "boolean"}]},
]
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "get_time"}},
]


def bodies() -> list[dict[str, Any]]:
    base = {"messages": [{"role": "user", "content": "Please"}], "max_tokens": 200, "n": 2, "seed": 11}
    formats = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in SCHEMAS]
    forms: list[dict[str, Any]] = [{"response_format": format} for format in formats]
    forms += [{"structured_outputs": {"choice": ["yes", "no"]}}, {"regex": "[ab]{3}-[0-9]{2}"}]
    forms += [{"grammar": 'start: "<" /[0-9]/ ">"', "logprobs": True, "top_logprobs": 2}]
    forms += [{"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}]
    forms += [{"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}]
    return [base | form | {"temperature": temperature} for form in forms for temperature in (0, 0.9)]


def check(body: dict[str, Any], choice: dict[str, Any]) -> None:
    """The choice is what its request asked for."""
    if "tools" in body:
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        schema = {"get_weather": PLACE, "get_time": {"maxProperties": 0}}[call["function"]["name"]]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        return
    text = choice["message"]["content"]
    assert choice["finish_reason"] == "stop", choice
    if "response_format" in body:
        jsonschema.validate(json.loads(text), body["response_format"]["json_schema"]["schema"])
    elif "structured_outputs" in body:
        assert text in ("yes", "no")
    else:
        assert len(text) == 6 if "regex" in body else text[1].isdigit()


def without_ids(answer: dict[str, Any]) -> list[Any]:
    """What must not depend on where and when an answer was made."""
    choices = answer["choices"]
    for choice in choices:
        for call in choice["message"].get("tool_calls", ()):
            del call["id"]
        if choice["logprobs"] is not None:  # values may differ in the last digits between batches
            choice["logprobs"] = [token["token"] for token in choice["logprobs"]["content"]]
    return list(choices)


def test_answers_are_valid_and_the_same_everywhere(
    serve: Callable[..., AbstractContextManager[Any]], tiny_model: Path
) -> None:
    """One after the other on a cold server, then all at once on a warm one."""
    told: dict[str, list[Any]] = {}
    for name, topology in zip(NAMES, TOPOLOGIES, strict=True):
        with serve(tiny_model, *topology, "--dtype", "float32", "--local-prefill", "never") as server:

            def ask(body: dict[str, Any], server: Any = server) -> list[Any]:
                status, answer = server.request("POST", CHAT, body)
                assert status == 200, answer
                for choice in answer["choices"]:
                    check(body, choice)
                return without_ids(answer)

            server.wait_idle()
            told[f"{name} cold"] = [ask(body) for body in bodies()]
            with ThreadPoolExecutor(8) as clients:
                told[f"{name} warm, together"] = list(clients.map(ask, bodies()))
            if name != "alone":
                server.require_handed_over()
    first = told["alone cold"]
    for name, answers in told.items():
        for body, expected, answer in zip(bodies(), first, answers, strict=True):
            assert answer == expected, (name, body)


def test_a_schema_that_takes_too_long_hurts_nobody(
    serve: Callable[..., AbstractContextManager[Any]], tiny_model: Path
) -> None:
    """AP18, SC09: it is refused, and the server goes on."""
    endless = {"allOf": [{"type": "string", "pattern": f"a{{{least},}}b"} for least in range(1, 30)]}
    with serve(tiny_model, "--prefill", "1", "--decode", "1") as server:
        fine, *_ = bodies()
        wrong = fine | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": endless}}}
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda body: server.request("POST", CHAT, body), [fine, wrong] * 4))
        assert [status for status, _ in answers] == [200, 400] * 4
        status, answer = server.request("POST", CHAT, fine | {"max_tokens": 3})  # in the middle of JSON
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        server.wait_idle()
