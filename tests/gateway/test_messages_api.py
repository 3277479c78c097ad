"""/v1/messages by Anthropic's client: whole, streamed; tools, thinking, stops, prefill, errors, counts."""

import json
from collections.abc import Callable
from typing import Any

import anthropic
import jsonschema
import msgspec
import pytest

from baton.core.messages import GenerateRequest
from baton.gateway.anthropic.format import MessagesFormat
from baton.gateway.deltas import Content, Delta, FinishedChoice, Reasoning
from baton.gateway.keys import digest_of
from baton.gateway.openai.answers import PromptTokensDetails, Usage
from baton.gateway.openai.schema import openapi

PATH = "/v1/messages"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HI: Any = [{"role": "user", "content": "hi"}]
USAGE = Usage(10, 4, 14, PromptTokensDetails(3))


@pytest.fixture
def says(tokenizer: Any) -> Callable[[str], list[int]]:
    """The tokens of an answer."""
    return lambda text: [*tokenizer.encode(text), *tokenizer.eos_token_ids]


def client_of(world: Any, key: str = "any") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=world.url, api_key=key, max_retries=0)


def ask(**fields: Any) -> Any:
    return {"model": "tiny-llama", "messages": HI, "max_tokens": 200} | fields


def prompt_of(decode: Any, tokenizer: Any, index: int = -1) -> str:
    request = decode.of(GenerateRequest)[index].request
    return str(tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False))


def events_of(raw: bytes) -> list[Any]:
    """The data of each event, which has the name that its type says; comments are left out."""
    events = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def validate(name: str, value: Any) -> None:
    components = openapi()["components"]
    jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components}).validate(value)


def test_a_text_whole_and_streamed(in_world: Any, says: Any, tokenizer: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(answer=says("Grüße, 世界!"), cached_tokens=2, chunk_size=2)
        system: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
        async with client_of(world) as client:
            message = await client.messages.create(**ask(system=system), extra_body={"top_k": 5, "temperature": 0.5})
            async with client.messages.stream(**ask(system=system)) as stream:
                texts = [text async for text in stream.text_stream]
                streamed = await stream.get_final_message()
        assert [(block.type, block.text) for block in message.content] == [("text", "Grüße, 世界!")]
        assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
        request = decode.of(GenerateRequest)[0].request
        assert (request.sampling.top_k, request.sampling.temperature) == (5, 0.5)
        assert message.usage.input_tokens == len(request.prompt_token_ids) - 2
        assert message.usage.cache_read_input_tokens == 2
        assert message.usage.output_tokens == len(says("Grüße, 世界!"))
        assert "".join(texts) == "Grüße, 世界!"
        assert [block.text for block in streamed.content] == ["Grüße, 世界!"]
        assert (streamed.usage, streamed.stop_reason) == (message.usage, "end_turn")
        assert prompt_of(decode, tokenizer).startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhi")

    in_world(scenario)


def test_the_events_of_a_stream(in_world: Any, says: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair(answer=says(f"Let me see.\n{CALL}"), chunk_size=2)
        async with world.post(PATH, ask(tools=[TOOL], stream=True)) as response:
            events = events_of(await response.read())
        for event in events:
            validate("StreamEvent", event)
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["message_start", "ping"]
        assert kinds[-2:] == ["message_delta", "message_stop"]
        blocks = [event for event in events if "index" in event]
        assert [(e["index"], e["type"]) for e in blocks if e["type"] != "content_block_delta"] == [
            (0, "content_block_start"),
            (0, "content_block_stop"),
            (1, "content_block_start"),
            (1, "content_block_stop"),
        ]
        assert events[0]["message"]["content"] == []
        assert events[0]["message"]["usage"]["input_tokens"] > 0
        deltas = [event for event in blocks if event["type"] == "content_block_delta"]
        assert "".join(e["delta"]["text"] for e in deltas if e["index"] == 0) == "Let me see."
        arguments = "".join(e["delta"]["partial_json"] for e in deltas if e["index"] == 1)
        assert json.loads(arguments) == {"city": "Oslo"}
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}

    in_world(scenario)


@pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_and_its_result(in_world: Any, says: Any, tokenizer: Any, choice: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(answer=says(CALL))
        more = {} if choice is None else {"tool_choice": choice}
        async with client_of(world) as client:
            message = await client.messages.create(**ask(tools=[TOOL], **more))
            async with client.messages.stream(**ask(tools=[TOOL], **more)) as stream:
                streamed = await stream.get_final_message()
            (call,) = message.content
            assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Oslo"})
            assert (streamed.content[0].name, streamed.content[0].input) == (call.name, call.input)
            assert message.stop_reason == streamed.stop_reason == "tool_use"
            history = [
                *HI,
                {"role": "assistant", "content": [call.model_dump()]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]},
                        {"type": "text", "text": "And"},
                        {"type": "text", "text": "then?"},
                    ],
                },
            ]
            await client.messages.create(**ask(messages=history, tools=[TOOL]))
        text = prompt_of(decode, tokenizer)
        assert "<tool_response>\nrain\n</tool_response>" in text
        assert "<|im_start|>user\nAnd\nthen?<|im_end|>" in text
        is_forced = choice is not None and choice["type"] != "auto"
        assert bool(decode.of(GenerateRequest)[0].request.sampling.grammar) is is_forced

    in_world(scenario)


def test_why_it_stopped(in_world: Any, says: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair(answer=says("one two three"), chunk_size=1)
        async with client_of(world) as client:
            for fields, reason, stop, text in (
                ({"max_tokens": 1}, "max_tokens", None, None),
                ({"stop_sequences": ["xyz", " two"]}, "stop_sequence", " two", "one"),
                ({"stop_sequences": ["three"]}, "stop_sequence", "three", "one two "),
                ({"stop_sequences": ["four"]}, "end_turn", None, "one two three"),
            ):
                message = await client.messages.create(**ask(**fields))
                async with client.messages.stream(**ask(**fields)) as stream:
                    streamed = await stream.get_final_message()
                for told in (message, streamed):
                    assert (told.stop_reason, told.stop_sequence) == (reason, stop), fields
                    assert text is None or told.content[0].text == text

    in_world(scenario)


def test_an_answer_that_has_been_begun(in_world: Any, tokenizer: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        async with client_of(world) as client:
            await client.messages.create(**ask(messages=[*HI, {"role": "assistant", "content": "The answer is"}]))
        assert prompt_of(decode, tokenizer).endswith("<|im_start|>assistant\nThe answer is")

    in_world(scenario)


def test_structured_output(in_world: Any, says: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(answer=says('{"city": "Oslo"}'))
        config = {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}}
        async with client_of(world) as client:
            message = await client.messages.create(**ask(output_config=config))
        assert json.loads(message.content[0].text) == {"city": "Oslo"}
        assert decode.of(GenerateRequest)[0].request.sampling.grammar

    in_world(scenario)


def test_thinking() -> None:
    """What the model thinks is a block before its answer, whole and streamed."""
    pieces = [Reasoning("hm"), Reasoning(", so"), Content("Yes"), Content(".")]
    whole = MessagesFormat("msg_1", "m").whole([FinishedChoice(0, list(pieces), [1, 2, 3, 4], "stop", [1])], USAGE)
    assert msgspec.json.decode(whole)["content"] == [
        {"type": "thinking", "thinking": "hm, so", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]
    assert msgspec.json.decode(whole)["usage"] == {
        "input_tokens": 7,
        "output_tokens": 4,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 0,
    }
    format = MessagesFormat("msg_1", "m")
    raw = b"".join(format.delta(Delta(0, [piece], [1]), None) for piece in pieces)
    events = events_of(raw + format.last(Delta(0, [], [], "length"), None) + format.end(USAGE))
    assert [event["content_block"]["type"] for event in events if "content_block" in event] == ["thinking", "text"]
    assert "".join(event["delta"].get("thinking", "") for event in events if "delta" in event) == "hm, so"
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_counted_tokens(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        async with client_of(world) as client:
            fields = {"messages": HI, "tools": [TOOL], "system": "Be short."}
            counted = await client.messages.count_tokens(model="tiny-llama", **fields)
            await client.messages.create(**ask(**fields))
        assert counted.input_tokens == len(decode.of(GenerateRequest)[0].request.prompt_token_ids)

    in_world(scenario)


def test_keys(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        async with client_of(world, "good") as client, client_of(world, "bad") as other:
            await client.messages.create(**ask())
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await other.messages.create(**ask())
        assert refused.value.body["type"] == "error"
        assert refused.value.body["error"]["type"] == "authentication_error"

    in_world(scenario, api_key_digests=(digest_of("good"),))


def test_a_failure_in_the_middle_is_told(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        async with client_of(world) as client:
            stream = await client.messages.create(**ask(stream=True))
            await world_module.until(lambda: decode.of(GenerateRequest), "the request")
            decode.emit(decode.request_id, 3)
            await anext(stream)
            decode.refuse(decode.request_id, "the worker is broken", retryable=False)
            with pytest.raises(anthropic.APIStatusError, match="the worker is broken"):
                [event async for event in stream]
        await world_module.until(lambda: world.is_empty, "the end")

    in_world(scenario)


def test_a_quiet_stream_is_kept_open_by_pings(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        async with world.post(PATH, ask(stream=True)) as response:
            raw = await response.content.readuntil(b"\n\n")
            while b"event: ping" not in raw:
                raw = await response.content.readuntil(b"\n\n")
            decode.finish(decode.request_id)
            assert events_of(await response.read())[-1] == {"type": "message_stop"}

    in_world(scenario, keep_alive_s=0.05)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 100_000}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    ({"messages": [*HI, {"role": "assistant", "content": ""}]}, "messages"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL | {"name": "two words"}]}, "tools[0].name"),
    (
        {"tools": [TOOL | {"input_schema": {"type": "object", "not": {}}}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
    ({"thinking": {"type": "hard"}}, "thinking.type"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
]


def test_what_is_refused_is_named_as_it_came(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        for fields, param in REFUSED:
            status, answer = await world.answer_to(PATH, ask(**fields))
            validate("AnthropicErrorAnswer", answer)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), (fields, answer)
            message = answer["error"]["message"]
            assert param in message, (fields, message)
            assert not any(word in message for word in ("response_format", ".function", "continue_final")), message
        assert decode.of(GenerateRequest) == []
        status, answer = await world.answer_to(PATH, ask(model="claude"))
        assert (status, answer["error"]["type"]) == (404, "not_found_error")
        async with world.http.get(world.url + PATH) as response:
            assert (response.status, (await response.json())["type"]) == (405, "error")

    in_world(scenario)
