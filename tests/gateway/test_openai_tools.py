"""Tools and structured output over HTTP: AP12, AP18, SC09 (what reaches a worker, and what comes back from it)."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.core.messages import GenerateRequest
from baton.core.request import SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
ARGUMENTS = '{"city": "Oslo", "days": 2}'
MESSAGES = [{"role": "user", "content": "How is the weather?"}]


def tool(name: str = "get_weather", **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}} | parameters
    return {"type": "function", "function": {"name": name, "description": "The weather", "parameters": schema}}


def asked(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "tools": [tool()], "max_tokens": 200} | fields


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture
def says(tokenizer: Any) -> Callable[[str], list[int]]:
    """The tokens of an answer."""
    return lambda text: [*tokenizer.encode(text), *tokenizer.eos_token_ids]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the chunks of one choice add up to; checks that ids and names come once."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        message["content"] += choice["delta"].get("content") or ""
        calls = choice["delta"].get("tool_calls", [])
        assert len({call["index"] for call in calls}) == len(calls)  # some clients take the last one of each only
        for call in calls:
            if call["index"] == len(message["tool_calls"]):
                assert call["type"] == "function"
                message["tool_calls"].append({"id": call["id"], "type": "function", "function": call["function"]})
                continue
            assert "id" not in call
            assert "name" not in call["function"]
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if choice["finish_reason"]:
            message["finish_reason"] = choice["finish_reason"]
    return message


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


@pytest.mark.parametrize("choice", ["auto", "required", named("get_weather"), allowed("auto", "get_weather"), None])
def test_a_call(in_world: Any, world_module: Any, says: Any, choice: Any) -> None:
    """Whole and streamed the same; with n and logprobs."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(answer=says(CALL), chunk_size=2)
        body = asked(n=2, logprobs=True) | ({} if choice is None else {"tool_choice": choice})
        status, answer = await world.answer_to(CHAT, body)
        assert status == 200, answer
        first = answer["choices"][0]
        assert first["message"]["content"] is None
        assert first["finish_reason"] == "tool_calls"
        (call,) = first["message"]["tool_calls"]
        assert call == {
            "id": call["id"],
            "type": "function",
            "function": {"name": "get_weather", "arguments": ARGUMENTS},
        }
        assert "".join(token["token"] for token in first["logprobs"]["content"]).startswith(CALL)
        # Choice 1 of a fake worker lacks the first character of the mark: no call.
        assert answer["choices"][1]["message"]["content"].startswith(CALL[1:])
        assert answer["choices"][1]["finish_reason"] == "stop"
        async with world.post(CHAT, body | {"stream": True}) as response:
            chunks = world_module.sse_chunks(await response.read())
        message = joined(chunks)
        assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
        assert (message["content"], message["finish_reason"]) == ("", "tool_calls")
        assert joined(chunks, 1)["content"] == answer["choices"][1]["message"]["content"]
        is_forced = choice in ("required", named("get_weather"))
        for message in decode.of(GenerateRequest):
            assert bool(message.request.sampling.grammar) is is_forced
            assert message.request.sampling.needs_known_tokens is is_forced

    in_world(scenario)


def test_only_allowed_tools_are_called_and_all_are_told(in_world: Any, tokenizer: Any, says: Any) -> None:
    """`auto`: a call of another is text. `required`: the grammar has the allowed ones alone."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(answer=says(CALL))
        body = asked(tools=[tool(), tool("look_up"), tool("add")])
        for mode, names, is_call in (("auto", ["add"], False), ("required", ["add", "get_weather"], True)):
            status, answer = await world.answer_to(CHAT, body | {"tool_choice": allowed(mode, *names)})
            assert status == 200, answer
            assert ("tool_calls" in answer["choices"][0]["message"]) is is_call
            request = decode.of(GenerateRequest)[-1].request
            prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            assert all(f'"name":"{name}"' in prompt for name in ("get_weather", "look_up", "add"))
            grammar = request.sampling.grammar or ""
            told = [name for name in ("get_weather", "look_up", "add") if name in grammar]
            assert told == ([] if mode == "auto" else ["get_weather", "add"])

    in_world(scenario)


def test_tools_are_described_to_a_model_whose_template_knows_none(in_world: Any, tokenizer: Any, says: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(answer=says("Fine."))
        history = [
            {"role": "system", "content": "Be short."},
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
            ]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ]  # fmt: skip
        status, answer = await world.answer_to(CHAT, asked(messages=history))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Fine.")
        prompt = tokenizer.decode(decode.of(GenerateRequest)[0].request.prompt_token_ids, skip_special_tokens=False)
        system, *_ = prompt.split("<|im_end|>")
        assert system.startswith("<|im_start|>system\nBe short.\n\n")
        assert json.dumps(tool(), separators=(",", ":")) in system
        assert '<tool_call>\n{"name":"get_weather","arguments":{"city":"Oslo","days":2}}\n</tool_call>' in prompt
        assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response>" in prompt
        await world.answer_to(CHAT, asked(tool_choice="none"))
        prompt = tokenizer.decode(decode.of(GenerateRequest)[1].request.prompt_token_ids, skip_special_tokens=False)
        assert "get_weather" not in prompt

    in_world(scenario)


@pytest.mark.parametrize(
    "text",
    [CALL.replace("get_weather", "other"), CALL.replace("2}}", "oops"), CALL[:40], "plain <tool_call>"],
)
def test_what_is_no_call_is_content(in_world: Any, world_module: Any, says: Any, text: str) -> None:
    async def scenario(world: Any) -> None:
        await world.pair(answer=says(text))
        _, answer = await world.answer_to(CHAT, asked())
        assert answer["choices"][0]["message"]["content"] == text
        assert "tool_calls" not in answer["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == "stop"
        async with world.post(CHAT, asked(stream=True)) as response:
            assert joined(world_module.sse_chunks(await response.read()))["content"] == text

    in_world(scenario)


def test_one_call_only(in_world: Any, says: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair(answer=says(f"{CALL}\n{CALL}"))
        _, answer = await world.answer_to(CHAT, asked(max_tokens=400))
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 2
        _, answer = await world.answer_to(CHAT, asked(max_tokens=400, parallel_tool_calls=False))
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 1

    in_world(scenario)


def test_text_without_tools_is_not_parsed(in_world: Any, says: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair(answer=says(CALL))
        for body in (asked(tools=None), asked(tool_choice="none")):
            _, answer = await world.answer_to(CHAT, body)
            assert answer["choices"][0]["message"]["content"] == CALL

    in_world(scenario)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMATS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"regex": "[a-z]+"}},
    {"structured_outputs": {"grammar": 'start: "a"+'}},
    {"structured_outputs": {"json_object": True}},
    {"guided_json": SCHEMA},
    {"guided_regex": "a/b"},
    {"guided_choice": ["yes", "no"]},
    {"guided_grammar": 'start: "a"'},
    {"regex": "a|b"},
    {"grammar": 'start: "a"'},
]


@pytest.mark.slow
def test_every_way_to_ask_for_structure_reaches_the_worker(in_world: Any, says: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(answer=says("{}"))
        for fields in FORMATS:
            for path, needed in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "hi"})):
                status, answer = await world.answer_to(path, needed | fields)
                assert status == 200, (fields, answer)
        sampled: list[SamplingParams] = [message.request.sampling for message in decode.of(GenerateRequest)]
        assert len(sampled) == 2 * len(FORMATS)
        assert all(json.loads(sampling.grammar)["grammars"] for sampling in sampled)
        await world.answer_to(CHAT, {"messages": MESSAGES, "response_format": {"type": "text"}})
        assert decode.of(GenerateRequest)[-1].request.sampling.grammar == ""

    in_world(scenario)


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


WRONG: list[tuple[dict[str, Any], str]] = [
    # AP18
    (schema_of({"type": "object", "properties": {"foo": "bar"}}), "response_format.json_schema.schema"),
    (schema_of({"type": "hiccup"}), "response_format.json_schema.schema"),
    (schema_of({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "response_format.json_schema.schema"),
    (schema_of({"not": {}}), "response_format.json_schema.schema"),
    (schema_of({"minProperties": 5}), "response_format.json_schema.schema"),
    (schema_of("text"), "response_format.json_schema.schema"),
    (schema_of(None), "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"regex": "foo**("}, "regex"),
    ({"guided_regex": "(?=a)"}, "guided_regex"),
    ({"grammar": "start: nothing"}, "grammar"),
    ({"grammar": 'root ::= "a"'}, "grammar"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
    ({"guided_json": {}, "regex": "a"}, "regex"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"regex": "a" * 200_000}, "regex"),
    # tools
    ({"tools": [tool()] * 2}, "tools[1].function.name"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [tool("no spaces")]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool() | {"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [tool(description="x" * 200_000)]}, "tools"),
    ({"tools": [tool()], "tool_choice": named("other")}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool()], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [tool()], "tool_choice": allowed("any", "get_weather")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [tool()], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tools": [tool()], "tool_choice": allowed("auto", "other")}, "tool_choice.allowed_tools.tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": named("get_weather")}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": "required", "regex": "a"}, "regex"),
    ({"tools": [tool(type="array")], "tool_choice": "required"}, "tools[0].function.parameters.type"),
    ({"tools": [tool(**{"not": {}})], "tool_choice": "required"}, "tools[0].function.parameters"),
]


@pytest.mark.slow
def test_what_cannot_be_enforced_is_refused_and_reaches_no_worker(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        for fields, param in WRONG:
            status, answer = await world.answer_to(CHAT, {"messages": MESSAGES} | fields)
            assert (status, answer.get("error", {}).get("param")) == (400, param), (fields, answer)
            assert len(answer["error"]["message"]) < 600
        assert decode.of(GenerateRequest) == []
        assert world.is_empty

    in_world(scenario)


def test_lone_surrogates_in_arguments_are_refused(in_world: Any) -> None:
    """AP12: in a call of the history, in a tool's description."""

    async def scenario(world: Any) -> None:
        await world.pair()
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\ud800"}'}}
        for body in (
            asked(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}]),
            asked(tools=[tool(description="\udfff")]),
            asked(tools=[tool()], tool_choice=named("\ud800")),
        ):
            async with world.http.post(world.url + CHAT, data=json.dumps(body)) as response:
                assert response.status == 400, await response.text()
                assert "surrogate" in (await response.json())["error"]["message"]

    in_world(scenario)
