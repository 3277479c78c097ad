"""What the official client offers beside plain calls, on a live disaggregated server: parse and streaming helpers,
tools, errors as its exceptions, raw responses, and the asynchronous client.
"""

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MESSAGES: Any = [{"role": "user", "content": "Who carries the baton?"}]


class Leg(BaseModel):
    runner: Literal["Ann", "Bob"]
    number: int = Field(ge=1, le=4)


class Race(BaseModel):
    """Nested, with a list: as users of the parse helper write them."""

    legs: list[Leg] = Field(min_length=1, max_length=2)
    is_over: bool


class GetWeather(BaseModel):
    """Weather of a place."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


def test_models(openai_client: openai.OpenAI, openai_server: Any) -> None:
    (model,) = openai_client.models.list().data
    assert model.id == openai_server.model
    assert openai_client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError, match=openai_server.model):
        openai_client.models.retrieve("another")


@pytest.mark.parametrize("temperature", [0, 1])
def test_parse_gives_objects(openai_client: openai.OpenAI, openai_server: Any, temperature: float) -> None:
    answer = openai_client.chat.completions.parse(
        model=openai_server.model, messages=MESSAGES, response_format=Race, n=2, seed=3, temperature=temperature
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Race)
        assert choice.finish_reason == "stop"


def test_parse_of_tools_gives_arguments(openai_client: openai.OpenAI, openai_server: Any) -> None:
    answer = openai_client.chat.completions.parse(
        model=openai_server.model,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=4,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_an_answer_that_is_cut_is_told_as_such(openai_client: openai.OpenAI, openai_server: Any) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        openai_client.chat.completions.parse(
            model=openai_server.model, messages=MESSAGES, response_format=Race, max_tokens=2
        )


def test_the_streaming_helper_gives_the_whole_answer(openai_client: openai.OpenAI, openai_server: Any) -> None:
    asked: dict[str, Any] = {"model": openai_server.model, "messages": MESSAGES, "seed": 6}
    beginning = openai_client.chat.completions.create(**asked, max_tokens=20).choices[0].message.content or ""
    asked["stop"] = beginning[8:11]  # the helper takes an answer that is cut at its length for an error
    whole = openai_client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    with openai_client.chat.completions.stream(
        **asked, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        told = stream.get_final_completion()
    assert told.choices[0].message.content == whole.choices[0].message.content
    assert told.choices[0].finish_reason == whole.choices[0].finish_reason
    assert told.choices[0].logprobs is not None
    assert whole.choices[0].logprobs is not None
    tokens = [
        [token.token for token in one.content or []] for one in (told.choices[0].logprobs, whole.choices[0].logprobs)
    ]
    assert tokens[0] == tokens[1]
    assert told.usage is not None
    assert whole.usage is not None
    assert told.usage.completion_tokens == whole.usage.completion_tokens
    kinds = {event.type for event in events}
    assert kinds >= {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"}


def test_the_streaming_helper_parses(openai_client: openai.OpenAI, openai_server: Any) -> None:
    with openai_client.chat.completions.stream(
        model=openai_server.model, messages=MESSAGES, response_format=Race, seed=8, n=2
    ) as stream:
        told = stream.get_final_completion()
    assert [type(choice.message.parsed) for choice in told.choices] == [Race, Race]


def test_the_streaming_helper_gives_tool_calls(openai_client: openai.OpenAI, openai_server: Any) -> None:
    with openai_client.chat.completions.stream(
        model=openai_server.model,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice={"type": "function", "function": {"name": "GetWeather"}},
        seed=9,
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        told = stream.get_final_completion()
    (call,) = told.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert [event.arguments for event in done] == [call.function.arguments]


def test_a_whole_turn_with_a_tool(openai_client: openai.OpenAI, openai_server: Any) -> None:
    """The client's own message object goes back as it came, with the tool's answer."""
    tools: Any = [openai.pydantic_function_tool(GetWeather)]
    asked: dict[str, Any] = {"model": openai_server.model, "tools": tools, "max_tokens": 200, "seed": 2}
    asked["parallel_tool_calls"] = False  # a random model calls without end
    first = openai_client.chat.completions.create(messages=MESSAGES, tool_choice="required", **asked).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sun": True})}
        for call in first.tool_calls or []
    ]
    assert results
    answer = openai_client.chat.completions.create(messages=[*MESSAGES, first, *results], tool_choice="none", **asked)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


WRONG: list[tuple[dict[str, Any], type[openai.APIStatusError], str, str | None]] = [
    ({"model": "another"}, openai.NotFoundError, "model", "model_not_found"),
    ({"temperature": 3}, openai.BadRequestError, "temperature", None),
    ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
    ({"stop": ""}, openai.BadRequestError, "stop", None),
    ({"n": 129}, openai.BadRequestError, "n", None),
    ({"modalities": ["audio"]}, openai.BadRequestError, "modalities", "unsupported_parameter"),
    ({"web_search_options": {}}, openai.BadRequestError, "web_search_options", "unsupported_parameter"),
    ({"messages": []}, openai.BadRequestError, "messages", None),
    ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "kind", "param", "code"), WRONG)
def test_errors_are_the_clients_own_exceptions(
    openai_client: openai.OpenAI,
    openai_server: Any,
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    param: str,
    code: str | None,
    stream: bool,
) -> None:
    asked: dict[str, Any] = {"model": openai_server.model, "messages": MESSAGES, "stream": stream} | fields
    with pytest.raises(kind) as raised:
        openai_client.chat.completions.create(**asked)
    assert (raised.value.param, raised.value.code) == (param, code)
    assert param in str(raised.value)


def test_raw_responses_have_the_id_of_the_request(openai_client: openai.OpenAI, openai_server: Any) -> None:
    raw = openai_client.completions.with_raw_response.create(
        model=openai_server.model, prompt="hi", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == raw.parse()._request_id == "mine-1"
    assert "Server-Timing" in raw.headers


def test_the_asynchronous_client_runs_many_at_once(openai_server: Any) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        asked: dict[str, Any] = {
            "model": openai_server.model,
            "prompt": f"runner {seed}",
            "seed": seed,
            "max_tokens": 10,
        }
        whole = await client.completions.create(**asked)
        text = ""
        async for chunk in await client.completions.create(**asked, stream=True):
            text += "".join(choice.text for choice in chunk.choices)
        assert text == whole.choices[0].text
        return text

    async def scenario() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{openai_server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(24)))

    assert len(set(asyncio.run(scenario()))) > 20


def test_a_stream_that_is_left_ends_its_work(openai_client: openai.OpenAI, openai_server: Any) -> None:
    with openai_client.completions.create(
        model=openai_server.model, prompt="hi", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    openai_server.wait_idle()
