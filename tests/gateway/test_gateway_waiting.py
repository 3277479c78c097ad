"""What clients see of the queue: headers, comments, errors after an answer has begun; and how they say who is first."""

import asyncio
import hashlib
from typing import Any

import openai
import pytest

from baton.core.messages import GenerateRequest, PrefillRequest
from baton.core.queueing import PRIORITY
from baton.core.request import Urgency
from baton.gateway.admission import Place
from baton.gateway.stream import spell_place

ANSWER = "Grüße, 世界! Baton runs 🏃 and stops."
BODY = {"prompt": "hi", "max_tokens": 500}
STREAM = BODY | {"stream": True}


async def comments_until(content: Any, wanted: str, seen: list[str]) -> None:
    """Reads events of a stream until `wanted` comes."""
    while not (seen and seen[-1] == wanted):
        seen.append((await content.readuntil(b"\n\n")).decode().strip())


def test_a_stream_that_waits_says_where_it_stands(
    in_world: Any, world_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.gateway.admission._PLACES_AGE_S", 0.0)

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=1)
        ahead = []
        for number in range(2):
            ahead.append(asyncio.create_task(world.answer_to("/v1/completions", BODY)))
            await world_module.until(lambda n=number: world.gateway.dispatcher.num_queued == n)
        async with world.post("/v1/completions", STREAM) as response:
            assert response.status == 200
            assert response.headers["X-Queue-Position"] == "2"
            assert "X-Queue-Estimated-Start-Ms" not in response.headers  # nothing has ended yet
            assert "X-Queue-Waited-Ms" not in response.headers
            seen: list[str] = []
            await comments_until(response.content, ": queue position 2", seen)
            decode.finish(decode.request_id)
            await comments_until(response.content, ": queue position 1", seen)
            decode.finish(decode.request_id)
            await comments_until(response.content, ": keep-alive", seen)
            decode.finish(decode.request_id)
            chunks = world_module.sse_chunks(await response.read())
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
        assert set(seen) == {": queue position 2", ": queue position 1", ": keep-alive"}
        assert [status for status, _ in await asyncio.gather(*ahead)] == [200, 200]

    in_world(scenario, keep_alive_s=0.02)


def test_the_start_is_estimated_from_what_has_ended(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=1)
        ahead = [asyncio.create_task(world.answer_to("/v1/completions", BODY)) for _ in range(6)]
        for number in range(4):
            await world_module.until(lambda n=number: len(decode.of(GenerateRequest)) == n + 1)
            decode.finish(decode.request_id)
        await world_module.until(lambda: world.gateway.dispatcher.num_queued == 1)
        async with world.post("/v1/completions", STREAM) as response:
            assert response.headers["X-Queue-Position"] == "2"
            estimate_ms = int(response.headers["X-Queue-Estimated-Start-Ms"])
            comment = (await response.content.readuntil(b"\n\n")).decode()
            assert comment.startswith(": queue position 2, estimated start in ")
            assert comment.endswith(" s\n\n")
            assert 0 <= estimate_ms < 60_000
            for number in range(4, 7):
                await world_module.until(lambda n=number: len(decode.of(GenerateRequest)) == n + 1)
                decode.finish(decode.request_id)
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await asyncio.gather(*ahead)

    in_world(scenario, keep_alive_s=0.02)


def test_whole_answers_say_how_they_waited(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=1)

        async def ask() -> Any:
            async with world.post("/v1/completions", BODY) as response:
                await response.read()
                return response.headers

        first = asyncio.create_task(ask())
        await world_module.until(lambda: decode.of(GenerateRequest))
        second = asyncio.create_task(ask())
        await world_module.until(lambda: world.gateway.dispatcher.num_queued == 1)
        decode.finish(decode.request_id)
        await world_module.until(lambda: len(decode.of(GenerateRequest)) == 2)
        decode.finish(decode.request_id)
        headers = await first
        assert (headers["X-Queue-Position"], headers["X-Queue-Estimated-Start-Ms"]) == ("0", "0")
        assert int(headers["X-Queue-Waited-Ms"]) >= 0
        assert (await second)["X-Queue-Position"] == "1"

    in_world(scenario)


def test_an_error_after_the_comments_is_the_last_event(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=1)
        first = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        async with world.post("/v1/completions", STREAM) as response:
            assert response.status == 200
            *comments, error = world_module.sse_events(await response.read())
        assert comments[0].startswith(": queue position 1")
        assert all(comment.startswith(":") for comment in comments)
        assert '"code":"overloaded"' in error
        assert "try again in" in error
        decode.finish(decode.request_id)
        await first
        assert world.is_empty

    in_world(scenario, keep_alive_s=0.02, max_queue_delay_s=0.2)


def test_past_the_target_is_a_plain_429_in_time(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=1)
        first = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        batch = asyncio.create_task(world.answer_to("/v1/completions", BODY | {"service_tier": "flex"}))
        for body in (BODY, STREAM):
            async with world.post("/v1/completions", body) as response:
                assert response.status == 429
                assert int(response.headers["Retry-After"]) >= 1
                assert response.headers["X-Queue-Position"] == "1"
                message = (await response.json())["error"]["message"]
                assert "300 ms target" in message
        decode.finish(decode.request_id)
        assert (await first)[0] == 200
        await world_module.until(lambda: len(decode.of(GenerateRequest)) == 2)
        decode.finish(decode.request_id)
        assert (await batch)[0] == 200  # it has no target

    in_world(scenario, ttft_target_s=0.3)


@pytest.mark.parametrize("stream", [True, False])
def test_openais_client_reads_over_the_comments(
    in_world: Any, world_module: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Place] = []
    monkeypatch.setattr("baton.gateway.stream.spell_place", lambda place: told.append(place) or spell_place(place))

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=1)
        first = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        client = openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="sk-test", max_retries=0)
        messages = [{"role": "user", "content": "hi"}]

        async def ask() -> tuple[str, str]:
            asked = client.chat.completions.create(
                model="tiny-llama", messages=messages, stream=stream, service_tier="priority"
            )
            if not stream:
                answer = await asked
                return answer.choices[0].message.content, answer.service_tier
            chunks = [chunk async for chunk in await asked]
            return "".join(c.choices[0].delta.content or "" for c in chunks), chunks[0].service_tier

        second = asyncio.create_task(ask())
        await world_module.until(lambda: world.gateway.dispatcher.num_queued == 1)
        await world_module.until(lambda: len(told) >= (3 if stream else 0), "some comments were sent")
        decode.finish(decode.request_id)
        await world_module.until(lambda: len(decode.of(GenerateRequest)) == 2)
        decode.finish(decode.request_id)
        assert await second == (ANSWER, "priority")
        await first
        await client.close()

    in_world(scenario, keep_alive_s=0.02)


# ---- who is first --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "priority", "is_batch", "tier"),
    [
        ({}, 2, False, None),
        ({"priority": -2}, 0, False, None),
        ({"priority": 2, "service_tier": None}, 4, False, None),
        ({"service_tier": "auto"}, 2, False, "default"),
        ({"service_tier": "default", "priority": 1}, 3, False, "default"),
        ({"service_tier": "priority"}, 1, False, "priority"),
        ({"service_tier": "priority", "priority": -2}, 0, False, "priority"),
        ({"service_tier": "flex"}, 2, True, "flex"),
    ],
)
def test_urgency_goes_to_the_workers_and_the_tier_comes_back(
    in_world: Any, world_module: Any, fields: dict[str, Any], priority: int, is_batch: bool, tier: str | None
) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.pair()
        headers = {"Authorization": "Bearer secret"}
        _, whole = await world.answer_to("/v1/completions", BODY | fields, headers=headers)
        async with world.post("/v1/completions", STREAM | fields, headers=headers) as response:
            chunks = world_module.sse_chunks(await response.read())
        key = hashlib.sha256(b"secret").hexdigest()[:16]
        urgency = Urgency(priority, key, is_batch)
        assert [m.request.urgency for m in decode.of(GenerateRequest)] == [urgency] * 2
        assert [m.urgency for m in prefill.of(PrefillRequest)] == [urgency] * 2
        assert [answer.get("service_tier") for answer in (whole, *chunks)] == [tier] * (1 + len(chunks))

    in_world(scenario)


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer  ", "Basic abc"])
def test_without_a_bearer_token_there_is_no_key(in_world: Any, authorization: str | None) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        headers = {} if authorization is None else {"Authorization": authorization}
        assert (await world.answer_to("/v1/completions", BODY, headers=headers))[0] == 200
        assert decode.of(GenerateRequest)[0].request.urgency == Urgency()

    in_world(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": 3}, "priority"),
        ({"priority": -3}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"service_tier": ""}, "service_tier"),
        ({"service_tier": 1}, "service_tier"),
    ],
)
def test_bad_urgency(in_world: Any, fields: dict[str, Any], param: str) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        status, body = await world.answer_to("/v1/completions", BODY | fields)
        assert (status, body["error"]["param"]) == (400, param)
        if param == "priority":
            assert "from -2 (first) to 2 (last)" in body["error"]["message"]

    in_world(scenario)


def test_the_high_class_goes_first(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=1)
        requests = []
        for number, priority in enumerate((0, 2, 0, -2)):
            body = BODY | {"prompt": [number + 3], "priority": priority}
            requests.append(asyncio.create_task(world.answer_to("/v1/completions", body)))
            await world_module.until(lambda n=number: world.gateway.dispatcher.num_queued == n)
        for number in range(4):
            await world_module.until(lambda n=number: len(decode.of(GenerateRequest)) == n + 1)
            decode.finish(decode.request_id)
        await asyncio.gather(*requests)
        assert [m.request.prompt_token_ids for m in decode.of(GenerateRequest)] == [[3], [6], [5], [4]]

    in_world(scenario, policy=PRIORITY)
