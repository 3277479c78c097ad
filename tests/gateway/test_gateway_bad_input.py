"""Every bad request gets a 4xx with the OpenAI error object that names the field; nothing of it reaches a worker."""

import json
import shutil
from typing import Any

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEEDED = {COMPLETIONS: '"prompt": "hi"', CHAT: '"messages": [{"role": "user", "content": "hi"}]'}

# (more JSON in the body, field at fault), for both endpoints
BOTH: list[tuple[str, str | None]] = [
    *((f'"{field}": {value}', None) for field in ("temperature", "top_p", "min_p") for value in ("NaN", "Infinity")),
    *((f'"temperature": {value}', "temperature") for value in ("-1", "2.1", '"0.5"', "1e400", "true", "[]")),
    *((f'"top_p": {value}', "top_p") for value in ("-0.1", "1.1", '"1"', "-1e400", "false")),
    *((f'"min_p": {value}', "min_p") for value in ("-0.1", "1.1", "{}")),
    *((f'"top_k": {value}', "top_k") for value in ("-2", "1.5", '"3"', "true")),
    *((f'"max_tokens": {value}', "max_tokens") for value in ("0", "-5", "1.0", '"4"', "true", "1000000000000000000")),
    ('"max_tokens": -9223372036854775809', "max_tokens"),
    *((f'"min_tokens": {value}', "min_tokens") for value in ("-1", "true", '900, "max_tokens": 5')),
    *((f'"seed": {value}', "seed") for value in ("1.5", '"7"', "true", "18446744073709551616", "-9223372036854775809")),
    *((f'"stop": {value}', "stop") for value in ('""', '[""]', '["a", ""]', "5", "[5]", "{}", json.dumps(["x"] * 17))),
    ('"stop": [null]', "stop"),
    *((f'"stop_token_ids": {value}', "stop_token_ids") for value in ("5", "[-1]", "[1.5]", "[true]", "[320]")),
    ('"stop_token_ids": ' + json.dumps([3] * 129), "stop_token_ids"),
    ('"stream_options": {"include_usage": true}', "stream_options"),
    ('"stream": "yes"', "stream"),
    ('"stream": true, "stream_options": {"include_usage": 1}', "stream_options.include_usage"),
    ('"ignore_eos": 1', "ignore_eos"),
    ('"model": 5', "model"),
    *((f'"n": {value}', "n") for value in ("0", "-1", "129", "1000000", "9223372036854775808", "true", '"1"', "1.5")),
    ('"best_of": "2"', "best_of"),
    ('"suffix": "x"', "suffix"),
    *((f'"logit_bias": {value}', "logit_bias") for value in ('{"320": 5}', '{"999999": 5}', '{"-1": 5}', "[]", "5")),
    *((f'"logit_bias": {value}', "logit_bias") for value in ('{"abc": 5}', '{"": 5}', '{"1.0": 5}', '{"\u0661": 5}')),
    *((f'"logit_bias": {{"5": {value}}}', "logit_bias") for value in ("101", "-100.5", '"5"', "true", "null", "1e400")),
    ('"logit_bias": {"5": NaN}', None),
    ('"logit_bias": ' + json.dumps({str(i): 1 for i in range(1025)}), "logit_bias"),
    *(
        (f'"{kind}_penalty": {value}', f"{kind}_penalty")
        for kind in ("presence", "frequency")
        for value in ("2.1", "-3", '"1"', "true", "1e400")
    ),
    ('"presence_penalty": NaN', None),
    ('"frequency_penalty": -Infinity', None),
    *((f'"repetition_penalty": {value}', "repetition_penalty") for value in ("0", "-1", "1e-300", "1e300", '"1"')),
    ('"repetition_penalty": NaN', None),
    ('"prompt_logprobs": 1', "prompt_logprobs"),
    ('"cache_salt": ""', "cache_salt"),
    ('"cache_salt": 5', "cache_salt"),
    ('"cache_salt": "' + "x" * 1025 + '"', "cache_salt"),
    ('"stop": "' + "x" * 1025 + '"', "stop"),
    ('"priority": 3', "priority"),
    ('"chat_template": "{{ 1 }}"', "chat_template"),
    ('"include_stop_str_in_output": 1', "include_stop_str_in_output"),
    ('"skip_special_tokens": "no"', "skip_special_tokens"),
    ('"add_special_tokens": 1', "add_special_tokens"),
    ('"bad_words": ["x"]', "bad_words"),
    ('"truncate_prompt_tokens": 5', "truncate_prompt_tokens"),
    ('"stream": true, "stream_options": {"continuous_usage_stats": 1}', "stream_options.continuous_usage_stats"),
    ('"user": "\\ud800"', "user"),
    ('"user": ' + "[" * 5000 + "]" * 5000, None),
]
# whole bodies
COMPLETION_BODIES: list[tuple[str, str | None]] = [
    ("{}", "prompt"),
    ('{"prompt": null}', "prompt"),
    *(
        (f'{{"prompt": {prompt}}}', "prompt")
        for prompt in (
            '""',
            "[]",
            '[""]',
            '["a", ""]',
            "[[]]",
            "[[5], []]",
            "5",
            "{}",
            "true",
            "[320]",
            "[-1]",
            "[1.5]",
            "[true]",
            "[[1], [-3]]",
            "[[1], [320]]",
            "[9223372036854775808]",
            "[99999999999999999999999]",
            '["a", 5]',
            '[5, "a"]',
            '["a", [5]]',
            '[[5], "a"]',
            "[null]",
            "[[null]]",
            "[{}]",
            '[["a"]]',
            json.dumps(["x"] * 129),
        )
    ),
    ('{"prompt": "\\ud800"}', "prompt"),
    ('{"prompt": "a\\udc00b"}', "prompt"),
    ('{"prompt": ["a", "\\udc00b"]}', "prompt"),
    ('{"prompt": "hi", "stop": ["\\ud83d"]}', "stop"),
    *((f'{{"prompt": "hi", "logprobs": {value}}}', "logprobs") for value in ("6", "-1", "1000000", "true", "1.5")),
    ('{"prompt": "hi", "n": 3, "best_of": 2}', "best_of"),
    ('{"prompt": "hi", "best_of": 129}', "best_of"),
    ('{"prompt": "hi", "best_of": 0}', "best_of"),
    ('{"prompt": "hi", "best_of": 2, "stream": true}', "best_of"),
    ('{"prompt": ["a", "b", "c", "d", "e", "f", "g", "h", "i"], "n": 128}', "n"),
    ('{"prompt": "hi", "echo": "yes"}', "echo"),
    ('{"prompt": "hi", "max_tokens": 0, "echo": false}', "max_tokens"),
    ('{"prompt": "hi", "continue_final_message": true}', "continue_final_message"),
]
CHAT_BODIES: list[tuple[str, str | None]] = [
    ("{}", "messages"),
    ('{"messages": null}', "messages"),
    ('{"messages": []}', "messages"),
    ('{"messages": "hi"}', "messages"),
    ('{"messages": {}}', "messages"),
    ('{"messages": ["hi"]}', "messages"),
    ('{"messages": [{"content": "hi"}]}', "messages[0].role"),
    ('{"messages": [{"role": 1, "content": "hi"}]}', "messages[0].role"),
    ('{"messages": [{"role": "alien", "content": "hi"}]}', "messages[0].role"),
    ('{"messages": [{"role": "user"}]}', "messages[0].content"),
    ('{"messages": [{"role": "user", "content": null}]}', "messages[0].content"),
    ('{"messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
    ('{"messages": [{"role": "user", "content": ["hi"]}]}', "messages[0].content[0]"),
    ('{"messages": [{"role": "user", "content": [{"text": "hi"}]}]}', "messages[0].content[0].type"),
    ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "messages[0].content[0].text"),
    ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages[0].content[0].type"),
    ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
    ('{"messages": [{"role": "\\ud800", "content": "a"}]}', "messages[0].role"),
    ('{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}', "messages[0].tool_calls[0].function"),
    *(
        (f'{{"messages": [{{"role": "assistant", "tool_calls": [{call}]}}]}}', f"messages[0].tool_calls[0].{at}")
        for call, at in (
            ('{"type": "retrieval", "function": {"name": "f"}}', "type"),
            ('{"function": {"arguments": "{}"}}', "function.name"),
            ('{"function": {"name": "f", "arguments": "{"}}', "function.arguments"),
            ('{"function": {"name": "f", "arguments": "[1]"}}', "function.arguments"),
            ('{"function": {"name": "f", "arguments": 5}}', "function.arguments"),
            ('{"function": {"name": "f", "arguments": "\\ud800"}}', "function.arguments"),
        )
    ),
    ('{"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}', "messages[0].tool_calls"),
    ('{"messages": [{"role": "assistant", "tool_calls": []}]}', "messages[0].content"),
    ('{"messages": [{"role": "user", "content": "x", "function_call": {"name": "f"}}]}', "messages[0].function_call"),
    ('{"messages": [{"role": "user", "content": "x", "name": "\\ud800"}]}', "messages[0].name"),
    *(
        (f'{{"messages": [{{"role": "user", "content": "hi"}}], {more}}}', param)
        for more, param in (
            ('"top_logprobs": 3', "top_logprobs"),
            ('"logprobs": false, "top_logprobs": 3', "top_logprobs"),
            ('"logprobs": true, "top_logprobs": 21', "top_logprobs"),
            ('"logprobs": true, "top_logprobs": -1', "top_logprobs"),
            ('"logprobs": 5', "logprobs"),
            ('"echo": true', "echo"),
            ('"best_of": 2', "best_of"),
            ('"max_tokens": 0', "max_tokens"),
            ('"continue_final_message": true, "add_generation_prompt": true', "continue_final_message"),
            ('"chat_template_kwargs": []', "chat_template_kwargs"),
            ('"chat_template_kwargs": {"messages": []}', "chat_template_kwargs"),
            ('"chat_template_kwargs": {"chat_template": "x"}', "chat_template_kwargs"),
            ('"chat_template_kwargs": {"eos_token": "x"}', "chat_template_kwargs"),
            ('"chat_template_kwargs": {"__class__": 1}', "chat_template_kwargs"),
            ('"chat_template_kwargs": {"a": "' + "x" * 17_000 + '"}', "chat_template_kwargs"),
            ('"documents": [{"text": "x"}]', "documents"),
        )
    ),
    ('{"messages": [{"role": "user", "content": ""}], "continue_final_message": true}', "continue_final_message"),
    ('{"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 0}', "max_completion_tokens"),
]
# no JSON object at all; for both
NO_OBJECT = ['"x"', "[]", "42", "null", "", "{", "{x", "[" * 200 + "]" * 200, "[" * 100000, "hello", "{'prompt': 1}"]


def cases(path: str) -> list[tuple[str, str | None]]:
    own = COMPLETION_BODIES if path == COMPLETIONS else CHAT_BODIES
    return [*own, *(("{" + NEEDED[path] + ", " + extra + "}", param) for extra, param in BOTH)]


async def refused(world: Any, path: str, body: bytes, status: int = 400) -> dict[str, Any]:
    """Posts `body`, checks what all refusals have in common, returns the error object."""
    async with world.http.post(world.url + path, data=body) as response:
        raw = await response.read()
        assert response.status == status, (body[:200], raw)
        assert response.headers["Content-Type"].startswith("application/json")
    assert len(raw) < 2048
    error: dict[str, Any] = json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} in an error"))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    for leak in ("Traceback", "Error(", ".py", "msgspec", "Struct", "_C"):
        assert leak not in error["message"]
    return error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields(in_world: Any, path: str, stream: bool) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        for body, param in cases(path):
            if stream and '"stream' not in body and body.startswith("{"):
                body = body[:-1] + (", " if body != "{}" else "") + '"stream": true}'
            error = await refused(world, path, body.encode())
            assert error["param"] == param, (body[:200], error)
            assert error["type"] == "invalid_request_error"
        for body in NO_OBJECT:
            error = await refused(world, path, body.encode())
            assert error["param"] is None
        assert (await refused(world, path, b'{"model": "\xff\xfe"}'))["param"] is None
        assert decode.live == {}
        needed = json.loads("{" + NEEDED[path] + "}")
        status, _ = await world.answer_to(path, needed)
        assert status == 200
        assert world.is_empty

    in_world(scenario)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_values_that_ask_for_nothing_pass(in_world: Any, path: str) -> None:
    neutral = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "suffix": "",
        "logprobs": False if path == CHAT else None,
        "top_logprobs": None,
        "logit_bias": {},
        "metadata": {"a": "b"},
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "stop": None,
        "max_tokens": None,
        "seed": None,
        "stream_options": None,
        "user": "somebody",
        "store": False,
        "unknown_field": {"a": [1, 2]},
        "kv_transfer_params": {"remote_port": -1, "tp_size": 10**9},
    }

    async def scenario(world: Any) -> None:
        await world.pair()
        needed = json.loads("{" + NEEDED[path] + "}")
        for stop in (None, [], "x", ["x"] * 16):
            status, body = await world.answer_to(path, needed | neutral | {"stop": stop})
            assert status == 200, body
        for sampling in ({"top_k": -1}, {"top_k": 10**9}, {"top_p": 0}, {"temperature": 5e-324}, {"seed": -1}):
            status, body = await world.answer_to(path, needed | sampling)
            assert status == 200, body

    in_world(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model(in_world: Any, stream: bool) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        for path in (COMPLETIONS, CHAT):
            for name in ("other", "x" * 10_000):
                body = json.loads("{" + NEEDED[path] + "}") | {"model": name, "stream": stream}
                error = await refused(world, path, json.dumps(body).encode(), 404)
                assert (error["param"], error["code"]) == ("model", "model_not_found")
                assert "tiny-llama" in error["message"]

    in_world(scenario)


def test_prompts_over_the_context_name_the_numbers(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        for prompt, max_tokens, numbers, param in (
            ([5] * 1024, None, ("1024", "1025"), "prompt"),
            ([5] * 1000, 25, ("1024", "1000", "25", "1025"), "max_tokens"),
            ([5] * 3000, 5, ("1024", "3000", "5", "3005"), "prompt"),
            ([5], 10**18, ("1024", "1", str(10**18)), "max_tokens"),
        ):
            body = {"prompt": prompt, "max_tokens": max_tokens}
            error = await refused(world, COMPLETIONS, json.dumps(body).encode())
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert all(number in error["message"] for number in numbers), error
            # litellm, for one, looks for these words, and its users for its ContextWindowExceededError.
            assert error["message"].startswith("this model's maximum context length is 1024 tokens")
        # The last token that fits, and a default that does not ask for more than there is.
        for body in ({"prompt": [5] * 1000, "max_tokens": 24}, {"prompt": [5] * 1020}, {"prompt": [5] * 1023}):
            status, _ = await world.answer_to(COMPLETIONS, body)
            assert status == 200
        long = {"messages": [{"role": "user", "content": "x" * 5000}]}
        error = await refused(world, CHAT, json.dumps(long).encode())
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        for endless in ("x" * 10_000, "x" * 300_000, "\u4e16" * 20_000):
            error = await refused(world, COMPLETIONS, json.dumps({"prompt": endless}).encode())
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert "1024" in error["message"]
            assert str(len(endless)) in error["message"]

    in_world(scenario)


def test_prompts_over_the_pool(in_world: Any) -> None:
    """It fits the context and no pool: refused at once, and those behind it run."""

    async def scenario(world: Any) -> None:
        await world.pair(num_blocks=4)
        error = await refused(world, COMPLETIONS, json.dumps({"prompt": [5] * 60, "max_tokens": 5}).encode())
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
        assert "64" in error["message"]
        status, _ = await world.answer_to(COMPLETIONS, {"prompt": [5] * 60, "max_tokens": 4})
        assert status == 200
        status, models = await world.get("/v1/models")
        assert models["data"][0]["max_model_len"] == 64

    in_world(scenario)


def test_large_bodies(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        for path in (COMPLETIONS, CHAT):
            error = await refused(world, path, b"x" * 100_001, 413)
            assert "100,000 bytes" in error["message"]
            # Many mistakes give one short answer.
            parts = [{"type": "wrong" * 5}] * 900
            body = {"messages": [{"role": "user", "content": parts}], "prompt": parts}
            await refused(world, path, json.dumps(body).encode())
            body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": "9" * 50_000}
            await refused(world, path, json.dumps(body).encode())
            await refused(world, path, json.dumps({"x" * 50_000: "\ud800"}).encode())
        assert (await world.answer_to(COMPLETIONS, {"prompt": "x"}))[0] == 200

    in_world(scenario, max_body_bytes=100_000)


def test_a_template_that_refuses(in_world: Any, tiny_model: Any, tmp_path: Any) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ raise_exception('roles must alternate') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    async def scenario(world: Any) -> None:
        await world.pair()
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
            error = await refused(world, CHAT, json.dumps(body).encode())
            assert error["param"] == "messages"
            assert "roles must alternate" in error["message"]
        status, _ = await world.answer_to(COMPLETIONS, {"prompt": "x"})
        assert status == 200

    in_world(scenario, model_folder=str(folder))
