"""/v1/responses by the official client: whole, streamed, parsed; calls, conversations, the store, what is refused."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from baton.core.messages import GenerateRequest
from baton.gateway.keys import digest_of
from baton.gateway.responses.store import ResponseStore, StoredResponse

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


class City(BaseModel):
    city: str


@pytest.fixture
def says(tokenizer: Any) -> Callable[[str], list[int]]:
    """The tokens of an answer."""
    return lambda text: [*tokenizer.encode(text), *tokenizer.eos_token_ids]


def client_of(world: Any, key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0)


def prompt_of(decode: Any, tokenizer: Any, index: int = -1) -> str:
    request = decode.of(GenerateRequest)[index].request
    return str(tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False))


async def events_of(client: openai.AsyncOpenAI, **fields: Any) -> list[Any]:
    """The events of a stream, which are numbered without gaps."""
    stream = await client.responses.create(model="tiny-llama", stream=True, **fields)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def test_a_text(in_world: Any, says: Any, tokenizer: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(answer=says("Grüße, 世界!"), cached_tokens=2)
        async with client_of(world) as client:
            response = await client.responses.create(
                model="tiny-llama",
                input="hi",
                instructions="Be short.",
                metadata={"a": "b"},
                temperature=0.5,
                user="me",
            )
        assert response.output_text == "Grüße, 世界!"
        (message,) = response.output
        assert (message.type, message.status, message.role) == ("message", "completed", "assistant")
        assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
        assert (response.metadata, response.instructions, response.temperature) == ({"a": "b"}, "Be short.", 0.5)
        prompt = decode.of(GenerateRequest)[0].request.prompt_token_ids
        usage = response.usage
        assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (len(prompt), 2)
        assert usage.output_tokens == len(says("Grüße, 世界!"))
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert usage.output_tokens_details.reasoning_tokens == 0
        text = prompt_of(decode, tokenizer)
        assert text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")

    in_world(scenario)


TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def test_a_streamed_text(in_world: Any, says: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair(answer=says("Grüße, 世界!"), chunk_size=2)
        async with client_of(world) as client:
            events = await events_of(client, input="hi")
            whole = await client.responses.create(model="tiny-llama", input="hi")
        assert list(dict.fromkeys(event.type for event in events)) == TEXT_EVENTS
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "Grüße, 世界!"
        first, last = events[0].response, events[-1].response
        assert (first.status, first.output, first.usage) == ("in_progress", [], None)
        assert events[2].item.content == []
        assert events[3].part.text == ""
        assert first.id == last.id
        assert last.output_text == "Grüße, 世界!"
        assert last.usage == whole.usage
        item_ids = {event.item_id for event in events if hasattr(event, "item_id")}
        assert item_ids == {last.output[0].id}

    in_world(scenario)


def test_the_clients_stream_helper(in_world: Any, says: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair(answer=says('{"city": "Oslo"}'))
        async with client_of(world) as client:
            parsed = await client.responses.parse(model="tiny-llama", input="hi", text_format=City)
            assert parsed.output_parsed == City(city="Oslo")
            async with client.responses.stream(model="tiny-llama", input="hi", text_format=City) as stream:
                final = await stream.get_final_response()
            assert final.output_parsed == City(city="Oslo")

    in_world(scenario)


def test_an_answer_that_is_cut_off(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        async with client_of(world) as client:
            response = await client.responses.create(model="tiny-llama", input="hi", max_output_tokens=3)
            assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert response.output[0].status == "incomplete"
            assert response.usage.output_tokens == 3
            events = await events_of(client, input="hi", max_output_tokens=3)
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == response.output_text

    in_world(scenario)


def allowed(mode: str | None, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "tools": tools} | ({} if mode is None else {"mode": mode})


@pytest.mark.parametrize(
    "choice",
    ["auto", "required", {"type": "function", "name": "get_weather"}, allowed("required", "get_weather")],
)
def test_a_call(in_world: Any, says: Any, choice: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(answer=says(CALL), chunk_size=2)
        asked: dict[str, Any] = {"input": "hi", "tools": [TOOL], "tool_choice": choice}
        async with client_of(world) as client:
            response = await client.responses.create(model="tiny-llama", **asked)
            events = await events_of(client, **asked)
        (call,) = response.output
        assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
        assert json.loads(call.arguments) == {"city": "Oslo"}
        told = response.tool_choice
        assert choice == (told if isinstance(told, str) else told.model_dump(exclude_unset=True))
        kinds = list(dict.fromkeys(event.type for event in events))
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert (events[2].item.name, events[2].item.arguments) == ("get_weather", "")
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == call.arguments == events[-1].response.output[0].arguments
        assert events[2].item.call_id == events[-1].response.output[0].call_id
        assert bool(decode.of(GenerateRequest)[0].request.sampling.grammar) is (choice != "auto")

    in_world(scenario)


def test_text_and_a_call_are_two_items(in_world: Any, says: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair(answer=says(f"Let me see.\n{CALL}"), chunk_size=2)
        async with client_of(world) as client:
            response = await client.responses.create(model="tiny-llama", input="hi", tools=[TOOL])
            events = await events_of(client, input="hi", tools=[TOOL])
        assert [item.type for item in response.output] == ["message", "function_call"]
        assert response.output_text == "Let me see."
        assert [event.output_index for event in events if event.type == "response.output_item.done"] == [0, 1]
        assert len({item.id for item in response.output}) == 2

    in_world(scenario)


def test_a_turn_with_a_call_sent_back(in_world: Any, says: Any, tokenizer: Any) -> None:
    """The items of an answer go back as they came, or by the answer's id: the prompt is the same."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(answer=says(CALL))
        async with client_of(world) as client:
            first = await client.responses.create(
                model="tiny-llama", input=[{"role": "user", "content": "hi"}], tools=[TOOL], instructions="Old."
            )
            call = first.output[0]
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            sent_back = [{"role": "user", "content": "hi"}, call.model_dump(), result]
            by_items = {"input": sent_back, "instructions": "New."}
            by_id = {"input": [result], "previous_response_id": first.id, "instructions": "New."}
            second = await client.responses.create(model="tiny-llama", tools=[TOOL], **by_id)
            await client.responses.create(model="tiny-llama", tools=[TOOL], **by_items)
            assert second.previous_response_id == first.id
            one, other = prompt_of(decode, tokenizer, 1), prompt_of(decode, tokenizer, 2)
            assert one == other
            assert "<tool_response>\nrain\n</tool_response>" in one
            assert '<tool_call>\n{"name":"get_weather","arguments":{"city":"Oslo"}}\n</tool_call>' in one
            assert "New." in one
            assert "Old." not in one
            third = await client.responses.create(
                model="tiny-llama", input="more", previous_response_id=second.id, tools=[TOOL]
            )
        assert prompt_of(decode, tokenizer).count('<tool_call>\n{"name":"get_weather"') == 2
        assert third.id != second.id

    in_world(scenario)


def test_what_is_stored(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        async with client_of(world, "first") as client, client_of(world, "second") as other:
            response = await client.responses.create(model="tiny-llama", input="hi")
            assert await client.responses.retrieve(response.id) == response
            streamed = (await events_of(client, input="hi"))[-1].response
            assert await client.responses.retrieve(streamed.id) == streamed
            with pytest.raises(openai.NotFoundError):
                await other.responses.retrieve(response.id)
            with pytest.raises(openai.NotFoundError):
                await other.responses.delete(response.id)
            with pytest.raises(openai.BadRequestError) as refused:
                await other.responses.create(model="tiny-llama", input="hi", previous_response_id=response.id)
            assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
            await client.responses.delete(response.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(response.id)
            unkept = await client.responses.create(model="tiny-llama", input="hi", store=False)
            assert unkept.store is False
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(unkept.id)

    in_world(scenario, api_key_digests=(digest_of("first"), digest_of("second")))


def test_input_items(in_world: Any, says: Any) -> None:
    """All that a stored answer answered, page by page; every item has an id that can be referred to."""

    async def scenario(world: Any) -> None:
        await world.pair(answer=says(CALL))
        async with client_of(world, "first") as client, client_of(world, "second") as other:
            first = await client.responses.create(model="tiny-llama", input="hi", tools=[TOOL])
            (call,) = first.output
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
            asked = [result, {"role": "user", "content": parts, "id": "msg_mine"}]
            second = await client.responses.create(
                model="tiny-llama", input=asked, previous_response_id=first.id, tools=[TOOL]
            )
            items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=3)]
            assert [item.type for item in items] == ["message", "function_call", "function_call_output", "message"]
            assert (items[0].role, items[0].content[0].text, items[0].content[0].type) == ("user", "hi", "input_text")
            assert (items[1].id, items[1].call_id, items[1].arguments) == (call.id, call.call_id, call.arguments)
            assert (items[2].call_id, items[2].output, items[2].status) == (call.call_id, "rain", "completed")
            assert (items[3].id, [part.text for part in items[3].content]) == ("msg_mine", ["a", "b"])
            assert len({item.id for item in items}) == 4

            page = await client.responses.input_items.list(second.id, limit=3)  # the newest first
            assert [item.id for item in page.data] == [item.id for item in items[:0:-1]]
            assert (page.has_more, page.first_id, page.last_id) == (True, items[3].id, items[1].id)
            (last,) = (await page.get_next_page()).data
            assert last.id == items[0].id
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.input_items.list(second.id, after="other")
            assert refused.value.param == "after"
            with pytest.raises(openai.NotFoundError):
                await other.responses.input_items.list(second.id)

    in_world(scenario, api_key_digests=(digest_of("first"), digest_of("second")))


def test_tokens_are_counted_as_they_are_billed(in_world: Any, says: Any) -> None:
    """Nothing is generated, and the number is that of the answer's usage."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(answer=says("Fine."))
        async with client_of(world) as client:
            first = await client.responses.create(model="tiny-llama", input="hi")
            asked: dict[str, Any] = {"input": "more", "instructions": "Be short.", "tools": [TOOL]}
            for fields in ({"input": "hi"}, asked, asked | {"previous_response_id": first.id}):
                num_sent = len(decode.of(GenerateRequest))
                counted = await client.responses.input_tokens.count(model="tiny-llama", **fields)
                assert len(decode.of(GenerateRequest)) == num_sent
                response = await client.responses.create(model="tiny-llama", **fields)
                assert counted.input_tokens == response.usage.input_tokens
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.input_tokens.count(model="tiny-llama", input=[])
            assert refused.value.param == "input"

    in_world(scenario)


def test_references_to_items(in_world: Any, says: Any, tokenizer: Any) -> None:
    """They stand for what is stored, input and output, of the same key; the same prompt as with the items."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(answer=says("Fine."))
        async with client_of(world, "first") as client, client_of(world, "second") as other:
            first = await client.responses.create(model="tiny-llama", input="hi")
            (item,) = (await client.responses.input_items.list(first.id)).data
            refers = [{"type": "item_reference", "id": one.id} for one in (item, *first.output)]
            asked = [*refers, {"role": "user", "content": "more"}]
            second = await client.responses.create(model="tiny-llama", input=asked)
            by_reference = prompt_of(decode, tokenizer)
            await client.responses.create(model="tiny-llama", input="more", previous_response_id=first.id)
            assert prompt_of(decode, tokenizer) == by_reference
            with pytest.raises(openai.BadRequestError) as refused:
                await other.responses.create(model="tiny-llama", input=asked)
            assert (refused.value.code, refused.value.param) == ("item_not_found", "input[0].id")
            # The second response has its own copy.
            await client.responses.delete(first.id)
            await client.responses.create(model="tiny-llama", input=asked)
            assert prompt_of(decode, tokenizer) == by_reference
            await client.responses.delete(second.id)

    in_world(scenario, api_key_digests=(digest_of("first"), digest_of("second")))


def test_items_are_found_as_long_as_a_response_holds_them() -> None:
    store = ResponseStore(max_responses=2)
    entries = {name: StoredResponse(b"a", name.encode(), 1, (name, "shared")) for name in "abc"}
    store.put("me", "a", entries["a"])
    store.put("me", "b", entries["b"])
    assert store.holder("me", "a") == entries["a"]
    assert store.holder("me", "shared") == entries["b"]
    assert store.holder("you", "a") is None
    store.delete("me", "a")
    assert store.holder("me", "a") is None
    assert store.holder("me", "shared") == entries["b"]
    store.put("me", "c", entries["c"])
    store.put("me", "d", StoredResponse(b"", b""))  # b goes
    assert [store.holder("me", name) for name in "bcd"] == [None, entries["c"], None]


def test_the_store_has_bounds() -> None:
    def entry(num_bytes: int) -> StoredResponse:
        return StoredResponse(b"a" * (num_bytes - 1), b"c")

    store = ResponseStore(max_responses=3, max_bytes=100)
    for name in "abc":
        store.put("me", name, entry(10))
    assert store.get("me", "a") == entry(10)  # now b is the least used
    store.put("me", "d", entry(10))
    assert [name for name in "abcd" if store.get("me", name)] == ["a", "c", "d"]
    store.put("you", "a", entry(85))
    assert [name for name in "abcd" if store.get("me", name)] == ["d"]
    assert store.num_bytes == 95
    assert not store.delete("me", "a")
    assert store.delete("you", "a")
    store.put("me", "huge", entry(101))
    assert store.get("me", "huge") is None
    assert store.num_bytes == 0


def test_logprobs(in_world: Any, says: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair(answer=says("Hello."), chunk_size=1)
        asked: dict[str, Any] = {"input": "hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
        async with client_of(world) as client:
            response = await client.responses.create(model="tiny-llama", **asked)
            events = await events_of(client, **asked)
        logprobs = response.output[0].content[0].logprobs
        assert "".join(score.token for score in logprobs).startswith("Hello.")
        assert {len(score.top_logprobs) for score in logprobs} == {2}
        told = [score for event in events if event.type == "response.output_text.delta" for score in event.logprobs]
        assert [score.logprob for score in told] == [score.logprob for score in logprobs][: len(told)]
        done = next(event for event in events if event.type == "response.output_text.done")
        assert [score.logprob for score in done.logprobs] == [score.logprob for score in logprobs]

    in_world(scenario)


def test_a_failure_in_the_middle_is_told(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        async with client_of(world) as client:
            stream = await client.responses.create(model="tiny-llama", input="hi", stream=True)
            await world_module.until(lambda: decode.of(GenerateRequest), "the request")
            decode.emit(decode.request_id, 3)
            events = [await anext(stream) for _ in range(5)]
            decode.refuse(decode.request_id, "the worker is broken", retryable=False)
            events += [event async for event in stream]
            assert events[-1].type == "response.failed"
            assert events[-1].response.status == "failed"
            assert "the worker is broken" in events[-1].response.error.message
            assert [event.sequence_number for event in events] == list(range(len(events)))
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(events[0].response.id)
        await world_module.until(lambda: world.is_empty, "the end")

    in_world(scenario)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tool_calls": 1}, "max_tool_calls"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [TOOL | {"name": "two words"}]}, "tools[0].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": allowed(None, "get_weather")}, "tool_choice.mode"),
    ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice.tools"),
    ({"tools": [TOOL], "tool_choice": allowed("auto", "get_weather", "f")}, "tool_choice.tools[1]"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
        "tool_choice.tools[0].type",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [TOOL | {"parameters": {"type": "object", "not": {}}}], "tool_choice": "required"},
        "tools[0].parameters",
    ),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{"type": "computer_call_output", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].call_id"),
    (
        {"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"}]},
        "input[0].arguments",
    ),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"temperature": 3}, "temperature"),
    ({"model": "other"}, "model"),
]


def test_what_is_refused_is_named_as_it_came(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        for fields, param in REFUSED:
            status, answer = await world.answer_to(PATH, {"input": "hi"} | fields)
            error = answer["error"]
            assert status == (404 if param == "model" else 400), fields
            assert error["param"] == param, (fields, error)
            told = error["message"]
            assert not any(word in told for word in ("messages", "response_format", ".function", " max_tokens")), told
        assert decode.of(GenerateRequest) == []

    in_world(scenario)


def test_values_that_ask_for_nothing_pass(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        body = {
            "input": "hi",
            "background": False,
            "truncation": "disabled",
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": None, "summary": "auto"},
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "stream_options": {"include_obfuscation": False},
            "prompt_cache_key": "x",
            "safety_identifier": "x",
        }
        status, answer = await world.answer_to(PATH, body)
        assert status == 200, answer
        assert answer["reasoning"] == {"effort": None, "summary": None}

    in_world(scenario)
