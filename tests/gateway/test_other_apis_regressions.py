"""The kinds of faults in test_openai_regressions.py at the other paths that take a request: Responses, Messages, and
what counts and spells tokens.
"""

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.core.messages import AbortRequest, GenerateRequest

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNTS = (f"{RESPONSES}/input_tokens", f"{MESSAGES}/count_tokens", "/tokenize")
NEEDED = {
    RESPONSES: '"input": "hi"',
    MESSAGES: '"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5',
    f"{RESPONSES}/input_tokens": '"input": "hi"',
    f"{MESSAGES}/count_tokens": '"messages": [{"role": "user", "content": "hi"}]',
    "/tokenize": '"prompt": "hi"',
    "/detokenize": '"tokens": [5]',
}
# AP01 AP23: the field in both APIs, and what it cannot be.
NUMBERS = {
    "temperature": ("NaN", "Infinity", "-1", "2.1", '"0.5"', "1e400", "true"),
    "top_p": ("NaN", "-Infinity", "1.1", "-1e400"),
    "top_k": ("NaN", "-2", "1.5", "1e400", '"1"'),
}
OWN_NUMBERS = {
    RESPONSES: {
        "max_output_tokens": ("0", "-1", "1.5", str(10**18), str(2**70), "NaN"),
        "top_logprobs": ("21", "-1", "1000000"),
        "presence_penalty": ("NaN", "3", "1e400"),
        "seed": (str(2**64), "1.5"),
        "metadata": (json.dumps({str(i): "x" for i in range(17)}), '{"a": 5}'),
    },
    MESSAGES: {
        "max_tokens": ("0", "-1", "1.5", str(10**18), str(2**70), "NaN"),
        "stop_sequences": (json.dumps(["x"] * 10**4), '[""]', "[5]", '"x"'),
    },
}
# AP12: anywhere a text can stand.
SURROGATES = {
    RESPONSES: (
        '{"input": "\\ud800"}',
        '{"input": [{"role": "user", "content": "a\\udc00"}]}',
        '{"input": "x", "instructions": "\\ud83d"}',
        '{"input": [{"type": "function_call", "call_id": "\\ud800", "name": "f", "arguments": "{}"}]}',
        '{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"\\ud800": 1}}]}',
        '{"input": "x", "metadata": {"a": "\\ud800"}}',
    ),
    MESSAGES: (
        '{"max_tokens": 5, "messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"max_tokens": 5, "messages": [{"role": "\\ud800", "content": "x"}]}',
        '{"max_tokens": 5, "messages": [], "system": "\\udfff"}',
        '{"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "stop_sequences": ["\\ud800"]}',
    ),
    "/tokenize": ('{"prompt": "\\ud800"}', '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    "/detokenize": (
        '{"tokens": [5], "model": "\\ud800"}',
        '{"tokens": [-1]}',
        '{"tokens": [320]}',
        '{"tokens": [1.5]}',
    ),
}
# AP25: many mistakes, or long ones.
LARGE = {
    RESPONSES: {"input": [{"role": "user", "content": [{"type": "wrong" * 5}] * 500}]},
    MESSAGES: {"max_tokens": "9" * 50_000, "messages": [{"role": "user", "content": [{"type": "wrong" * 9}] * 500}]},
    "/tokenize": {"prompt": ["x" * 50_000]},
    "/detokenize": {"tokens": ["x" * 50_000] * 3},
}


def wrong_bodies(path: str) -> list[str]:
    fields = OWN_NUMBERS.get(path, {}) | (NUMBERS if path in (RESPONSES, MESSAGES) else {})
    bodies = [
        f'{{{NEEDED[path]}, "{name}": {value}, "stream": {stream}}}'
        for name, values in fields.items()
        for value in values
        for stream in ("false", "true")
    ]
    return [*bodies, *SURROGATES.get(path, ()), *([json.dumps(LARGE[path])] if path in LARGE else [])]


async def refused(world: Any, path: str, body: str) -> str:
    """Checks what all refusals have in common, and returns the message."""
    async with world.http.post(world.url + path, data=body.encode()) as response:
        raw = await response.read()
        assert response.status == 400, (path, body[:200], raw[:300])
        assert response.headers["Content-Type"].startswith("application/json")
    assert len(raw) < 2048
    error = json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} in an error"))["error"]
    for leak in ("Traceback", "Error(", ".py", "msgspec", "Struct", "_C"):
        assert leak not in error["message"], error
    return str(error["message"])


@pytest.mark.parametrize("path", NEEDED)
def test_bad_values(in_world: Any, path: str) -> None:
    """AP01 AP12 AP23 AP25: refused in few words before anything is streamed; the next request is answered."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        for body in wrong_bodies(path):
            await refused(world, path, body)
        assert decode.of(GenerateRequest) == []
        status, answer = await world.answer_to(path, json.loads(f"{{{NEEDED[path]}}}"))
        assert status == 200, answer

    in_world(scenario)


def test_nul_and_odd_characters_are_text(in_world: Any) -> None:
    """AP12, the part that is good input."""

    async def scenario(world: Any) -> None:
        await world.pair()
        for text in ("\x00", "a\x00b", "\ufffe\uffff", "\U0010ffff", "\u202e"):
            message = {"messages": [{"role": "user", "content": text}]}
            for path, body in (
                (RESPONSES, {"input": text, "instructions": text, "metadata": {"a": text}}),
                (MESSAGES, message | {"system": text, "max_tokens": 1, "stop_sequences": [text]}),
                (COUNTS[0], {"input": text}),
                (COUNTS[1], message),
                ("/tokenize", {"prompt": text, "return_token_strs": True}),
            ):
                status, answer = await world.answer_to(path, body)
                assert status == 200, (path, answer)

    in_world(scenario)


def test_a_template_that_refuses(in_world: Any, tiny_model: Path, tmp_path: Path) -> None:
    """AP16."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ raise_exception('roles must alternate') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    async def scenario(world: Any) -> None:
        await world.pair()
        for path in (RESPONSES, MESSAGES, *COUNTS[:2]):
            for stream in ("false", "true"):
                assert "roles must alternate" in await refused(world, path, f'{{{NEEDED[path]}, "stream": {stream}}}')
        body = '{"messages": [{"role": "user", "content": "x"}]}'
        assert "roles must alternate" in await refused(world, "/tokenize", body)

    in_world(scenario, model_folder=str(folder))


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_prompts_over_the_context_name_the_numbers(in_world: Any, path: str) -> None:
    """AP19."""
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"

    async def scenario(world: Any) -> None:
        await world.pair()
        for stream in ("false", "true"):
            message = await refused(world, path, f'{{{NEEDED[path]}, "{length}": 2000, "stream": {stream}}}')
            assert "1024" in message
            assert "2000" in message
            assert length in message

    in_world(scenario)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_clients_that_do_not_wait(in_world: Any, world_module: Any, path: str) -> None:
    """AP27 AP21: whoever leaves takes the work along; all of them call their requests the same."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=256)
        body = json.loads(f"{{{NEEDED[path]}}}")
        for round_number in range(10):
            clients = [
                asyncio.create_task(world.answer_to(path, body | {"stream": stream}, headers={"X-Request-Id": "mine"}))
                for stream in (False, True)
            ]
            await world_module.until(lambda number=round_number: len(decode.of(GenerateRequest)) == 2 * (number + 1))
            for client in clients:
                client.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await client
            await world_module.until(lambda: world.is_empty, "the table is empty")
        asked = {message.request.request_id for message in decode.of(GenerateRequest)}
        assert len(asked) == 20
        assert {abort.request_id for abort in decode.of(AbortRequest)} == asked

    in_world(scenario)


def test_counts_that_cannot_be(in_world: Any) -> None:
    """ME01: a worker that claims more cached tokens than the prompt has."""

    async def scenario(world: Any) -> None:
        await world.pair(cached_tokens=10_000)
        _, answer = await world.answer_to(RESPONSES, json.loads(f"{{{NEEDED[RESPONSES]}}}"))
        usage = answer["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] > 0
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        _, answer = await world.answer_to(MESSAGES, json.loads(f"{{{NEEDED[MESSAGES]}}}"))
        assert answer["usage"]["input_tokens"] == 0
        assert answer["usage"]["cache_read_input_tokens"] > 0

    in_world(scenario)
