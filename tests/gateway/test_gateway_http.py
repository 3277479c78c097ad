"""Good requests over real HTTP: both endpoints, stream and not, and the operational paths."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from baton.core.messages import GenerateRequest, PrefillRequest
from baton.gateway.stream import Response

ANSWER = "Grüße, 世界! Baton runs 🏃 and stops."
CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
COMPLETION = {"prompt": "hi", "temperature": 0, "max_tokens": 500}


def test_completion(in_world: Any, answer: list[int], tokenizer: Any) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.pair(cached_tokens=1)
        status, body = await world.answer_to("/v1/completions", COMPLETION)
        assert status == 200
        assert body["object"] == "text_completion"
        assert body["model"] == "tiny-llama"
        assert body["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}]
        num_prompt = len(tokenizer.encode("hi"))
        assert body["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(answer),
            "total_tokens": num_prompt + len(answer),
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        (generate,), (prompt,) = decode.of(GenerateRequest), prefill.of(PrefillRequest)
        assert generate.prefill == prefill.ref
        assert prompt.decode == decode.ref
        assert prompt.request_id == generate.request.request_id
        assert prompt.token_ids == generate.request.prompt_token_ids == tokenizer.encode("hi")
        assert world.is_empty

    in_world(scenario)


def test_chat(in_world: Any, answer: list[int]) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        status, body = await world.answer_to("/v1/chat/completions", CHAT)
        assert status == 200
        assert body["object"] == "chat.completion"
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
        assert choice["finish_reason"] == "stop"
        (generate,) = decode.of(GenerateRequest)
        # No max_tokens: the rest of the context.
        assert generate.request.sampling.max_tokens == 1024 - generate.request.num_prompt_tokens

    in_world(scenario)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("max_tokens", [1, 3, 7, 500])
@pytest.mark.parametrize("stop", [None, "Baton ", ["ps.", "世界"]])
def test_stream_equals_whole(
    in_world: Any, world_module: Any, path: str, body: dict[str, Any], max_tokens: int, stop: Any
) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        asked = body | {"max_tokens": max_tokens, "stop": stop}
        _, whole = await world.answer_to(path, asked)
        async with world.post(path, asked | {"stream": True, "stream_options": {"include_usage": True}}) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            raw = await response.read()
        *chunks, usage = world_module.sse_chunks(raw)
        choices = [chunk["choices"][0] for chunk in chunks]
        (expected,) = whole["choices"]
        expected_text = expected["text"] if "text" in expected else expected["message"]["content"]
        text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
        assert text == expected_text
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [expected["finish_reason"]]
        assert choices[-1]["finish_reason"] == expected["finish_reason"]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"] == whole["usage"]
        assert {chunk["object"] for chunk in chunks} == {
            "text_completion" if path == "/v1/completions" else "chat.completion.chunk"
        }

    in_world(scenario)


def test_stream_without_usage_has_none(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
            async with world.post("/v1/chat/completions", CHAT | {"stream": True} | options) as response:
                chunks = world_module.sse_chunks(await response.read())
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}

    in_world(scenario)


def test_timing_is_told(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        async with world.post("/v1/completions", COMPLETION) as response:
            timing = response.headers["Server-Timing"]
        assert "received_to_tokenised;dur=" in timing
        assert "handover_copy;dur=1.000" in timing
        assert "handover_message;dur=0.500" in timing
        async with world.post("/v1/completions", COMPLETION | {"stream": True}) as response:
            raw = await response.read()
        assert b"\n\n: timing received_to_tokenised;dur=" in raw
        assert raw.endswith(b"\n\ndata: [DONE]\n\n")

    in_world(scenario)


def test_list_of_prompts_keeps_its_order(in_world: Any, world_module: Any, tokenizer: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        status, body = await world.answer_to("/v1/completions", COMPLETION | {"prompt": ["a", "b", "c"]})
        assert status == 200
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert [m.request.prompt_token_ids for m in decode.of(GenerateRequest)] == [
            tokenizer.encode(text) for text in "abc"
        ]
        async with world.post("/v1/completions", COMPLETION | {"prompt": [[5], [6, 7]], "stream": True}) as response:
            chunks = world_module.sse_chunks(await response.read())
        for index in (0, 1):
            own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert "".join(c["text"] for c in own) == ANSWER
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]

    in_world(scenario)


def test_request_id_is_echoed_but_never_used(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        for _ in range(2):
            async with world.post("/v1/completions", COMPLETION, headers={"X-Request-Id": "mine"}) as response:
                assert response.headers["X-Request-Id"] == "mine"
        first, second = (m.request.request_id for m in decode.of(GenerateRequest))
        assert len({first, second, "mine"}) == 3
        async with world.post("/v1/completions", COMPLETION, headers={"X-Request-Id": "x" * 500}) as response:
            assert len(response.headers["X-Request-Id"]) == 32

    in_world(scenario)


def test_operational_paths(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        status, models = await world.get("/v1/models")
        assert status == 200
        (model,) = models["data"]
        assert (model["id"], model["max_model_len"], model["vocab_size"]) == ("tiny-llama", 1024, 320)
        assert await world.get("/v1/models/tiny-llama") == (200, model)
        assert (await world.get("/v1/models/org/other"))[0] == 404
        assert (await world.get("/health"))[0] == 200
        assert (await world.get("/"))[1]["model"] == "tiny-llama"
        status, ledger = await world.get("/ledger")
        assert status == 200
        assert ledger["idle"] is True
        assert ledger["workers"]["decode-0"]["free"] == 256
        assert ledger["gateway"] == {"in_flight": 0, "queued": 0}
        status, fleet = await world.get("/workers")
        assert status == 200
        assert [(w["id"], w["kv_tokens"]) for w in fleet["workers"]] == [("decode-0", 4096), ("prefill-0", 4096)]
        async with world.http.post(world.url + "/flush_cache") as response:
            assert (await response.json())["flushed_blocks"] == {"prefill-0": 7, "decode-0": 7}
        for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/", 405)):
            async with world.http.request(method, world.url + path) as response:
                assert response.status == status
                assert (await response.json())["error"]["message"]

    in_world(scenario)


def test_ledger_tells_of_running_requests(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        async with world.post("/v1/completions", COMPLETION | {"stream": True}) as response:
            await world_module.until(lambda: decode.of(GenerateRequest))
            _, ledger = await world.get("/ledger")
            assert ledger["idle"] is False
            assert ledger["gateway"] == {"in_flight": 1, "queued": 0}
            decode.finish(decode.request_id)
            await response.read()
        _, ledger = await world.get("/ledger")
        assert ledger["idle"] is True

    in_world(scenario, keep_alive_s=0.02)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("stop", [None, "Baton"])
def test_token_ids_on_request(
    in_world: Any, world_module: Any, answer: list[int], path: str, body: dict[str, Any], stop: Any
) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        asked = body | {"return_token_ids": True, "stop": stop}
        _, whole = await world.answer_to(path, asked)
        (choice,) = whole["choices"]
        assert choice["token_ids"] == answer[: whole["usage"]["completion_tokens"]]
        holder = choice if path == "/v1/completions" else whole
        assert holder["prompt_token_ids"] == decode.of(GenerateRequest)[0].request.prompt_token_ids
        async with world.post(path, asked | {"stream": True}) as response:
            chunks = world_module.sse_chunks(await response.read())
        streamed = [token_id for c in chunks for token_id in c["choices"][0].get("token_ids", [])]
        assert streamed == choice["token_ids"]

    in_world(scenario)


def test_long_bodies_are_read_too(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        status, _ = await world.answer_to("/v1/completions", COMPLETION | {"user": "x" * 300_000})
        assert status == 200
        status, body = await world.answer_to("/v1/completions", {"prompt": [5] * 200_000})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        status, body = await world.answer_to("/v1/completions", {"user": ["x"] * 100_000, "prompt": "a", "top_p": "1"})
        assert (status, body["error"]["param"]) == (400, "top_p")

    in_world(scenario)


def test_a_bug_after_the_head_of_an_answer_cuts_the_connection(
    in_world: Any, world_module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No second answer within the first: a client would take it for a part of the stream."""

    async def events(*_: object) -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Response, "events", events)

    async def scenario(world: Any) -> None:
        await world.pair()
        async with world.post("/v1/completions", {"prompt": "hi", "max_tokens": 5, "stream": True}) as response:
            assert response.status == 200
            assert await response.content.readuntil(b"\n\n") == b"data: {}\n\n"
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        await world_module.until(lambda: world.is_empty, "nothing runs any more")
        async with world.http.get(f"{world.url}/metrics") as response:
            assert 'baton_http_responses_total{status_class="5xx"} 1.0' in await response.text()

    in_world(scenario)
    ours = [record.message for record in caplog.records if record.name.startswith("baton")]
    assert ours == ["an answer that had begun failed"]
