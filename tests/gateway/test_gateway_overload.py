"""More requests than credit, missing workers, slow clients, shutting down."""

import asyncio
from typing import Any

import pytest

from baton.core.messages import GenerateRequest, PrefillRequest, Role

ANSWER = "Grüße, 世界! Baton runs 🏃 and stops."
BODY = {"prompt": "hi", "max_tokens": 500}


def test_requests_wait_for_credit_in_their_order(in_world: Any, world_module: Any, tokenizer: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=1)
        requests = []
        for number, text in enumerate("abc"):
            requests.append(asyncio.create_task(world.answer_to("/v1/completions", BODY | {"prompt": text})))
            await world_module.until(
                lambda n=number: world.gateway.dispatcher.num_in_flight + world.gateway.dispatcher.num_queued == n + 1
            )
        for number in range(3):
            await world_module.until(lambda n=number: len(decode.of(GenerateRequest)) == n + 1)
            assert len(decode.live) == 1
            decode.finish(decode.request_id)
        assert [status for status, _ in await asyncio.gather(*requests)] == [200, 200, 200]
        assert [m.request.prompt_token_ids for m in decode.of(GenerateRequest)] == [tokenizer.encode(t) for t in "abc"]

    in_world(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_refuses(in_world: Any, world_module: Any, stream: bool) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=1)
        waiting = [asyncio.create_task(world.answer_to("/v1/completions", BODY)) for _ in range(2)]
        await world_module.until(lambda: world.gateway.dispatcher.num_queued == 1)
        async with world.post("/v1/completions", BODY | {"stream": stream}) as response:
            assert response.status == 429
            assert 1 <= int(response.headers["Retry-After"]) <= 60
            error = (await response.json())["error"]
        assert error["type"] == "rate_limit_error"
        # Of two prompts in one request neither is left behind when the second finds the queue full.
        for number in range(2):
            await world_module.until(lambda n=number: len(decode.of(GenerateRequest)) == n + 1)
            decode.finish(decode.request_id)
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]
        status, _ = await world.answer_to("/v1/completions", BODY | {"prompt": ["a", "b", "c"]})
        assert status == 429
        await world_module.until(lambda: world.is_empty)

    in_world(scenario, max_queue=1)


def test_waiting_too_long_is_refused(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=1)
        first = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        async with world.post("/v1/completions", BODY | {"stream": True}) as response:
            assert response.status == 429
            assert "Retry-After" in response.headers
        decode.finish(decode.request_id)
        assert (await first)[0] == 200

    in_world(scenario, max_queue_delay_s=0.2)


def test_a_request_whose_only_fitting_worker_left_does_not_hold_up_the_queue(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        small = world.worker("decode-0", Role.DECODE, num_blocks=8)
        large = world.worker("decode-1", Role.DECODE, auto=False)
        await world_module.until(lambda: len(world.gateway.membership.workers) == 2)
        long = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: large.of(GenerateRequest))
        large.leave()
        assert (await long)[0] == 503
        assert (await world.answer_to("/v1/completions", BODY | {"max_tokens": 20}))[0] == 200
        assert len(small.of(GenerateRequest)) == 1
        assert world.is_empty

    in_world(scenario, expected_prefill=0)


def test_nobody_has_joined(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        async with world.post("/v1/completions", BODY) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
        assert world.is_empty

    in_world(scenario, max_queue_delay_s=0.1)


def test_a_request_waits_for_the_first_pair(in_world: Any, world_module: Any) -> None:
    """Decode alone could answer, but the launcher said that a prefill worker comes."""

    async def scenario(world: Any) -> None:
        request = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: world.gateway.dispatcher.num_queued == 1)
        decode = world.worker("decode-0", Role.DECODE)
        await world_module.until(lambda: world.gateway.membership.workers)
        assert decode.of(GenerateRequest) == []
        prefill = world.worker("prefill-0", Role.PREFILL)
        assert (await request)[0] == 200
        assert decode.of(GenerateRequest)[0].prefill == prefill.ref

    in_world(scenario)


def test_without_a_prefill_pool_decode_does_all(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        decode = world.worker("decode-0", Role.DECODE)
        status, body = await world.answer_to("/v1/completions", BODY)
        assert (status, body["choices"][0]["text"]) == (200, ANSWER)
        assert decode.of(GenerateRequest)[0].prefill is None
        await world_module.until(lambda: world.gateway.probe.ready)

    in_world(scenario, expected_prefill=0)


def test_long_prompts_are_spread_over_prefill_workers(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        first, decode = await world.pair(auto=False)
        second = world.worker("prefill-1", Role.PREFILL)
        await world_module.until(lambda: len(world.gateway.membership.workers) == 3)
        requests = [
            asyncio.create_task(world.answer_to("/v1/completions", {"prompt": [i + 3] * 300, "max_tokens": 1}))
            for i in range(6)
        ]
        await world_module.until(lambda: len(decode.of(GenerateRequest)) == 6)
        assert len(first.of(PrefillRequest)) == len(second.of(PrefillRequest)) == 3
        for message in decode.of(GenerateRequest):
            decode.finish(message.request.request_id)
        await asyncio.gather(*requests)

    in_world(scenario)


def test_bad_requests_say_nothing_about_workers(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        for _ in range(20):
            status, _ = await world.answer_to("/v1/completions", BODY | {"prompt": [5] * 2000})
            assert status == 400
        assert (await world.answer_to("/v1/completions", BODY))[0] == 200

    in_world(scenario)


def test_a_long_wait_is_kept_alive(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        async with world.post("/v1/completions", BODY | {"stream": True}) as response:
            seen = await response.content.readuntil(b"\n\n")
            assert seen == b": keep-alive\n\n"
            decode.finish(decode.request_id)
            raw = await response.read()
        assert "".join(c["choices"][0]["text"] for c in world_module.sse_chunks(raw)) == ANSWER

    in_world(scenario, keep_alive_s=0.02)


def test_a_client_that_takes_nothing_is_dropped(
    in_world: Any, world_module: Any, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    monkeypatch.setattr("baton.gateway.answering.CLIENT_STALL_S", 0.2)

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        host, port = world.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1)
        body = b'{"prompt": "hi", "max_tokens": 1000, "stream": true, "ignore_eos": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await world_module.until(lambda: decode.of(GenerateRequest))
        # Comments fill the sockets' buffers, for nobody reads.
        await world_module.until(lambda: world.is_empty, "the generation of the stuck client has ended")
        writer.close()
        del reader

    # A comment is small, so the test makes the keep-alive huge rather than frequent.
    monkeypatch.setattr("baton.gateway.openai.formats.CompletionFormat.keep_alive", b":" + b"x" * 4_000_000 + b"\n\n")
    in_world(scenario, keep_alive_s=0.01)


def test_draining_finishes_what_runs(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        running = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        draining = asyncio.create_task(world.gateway.drain(10.0))
        await world_module.until(lambda: world.gateway.dispatcher.is_draining)
        status, body = await world.answer_to("/v1/completions", BODY)
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert (await world.get("/ready"))[0] == 503
        decode.finish(decode.request_id)
        assert (await running)[0] == 200
        await draining

    in_world(scenario)


def test_while_it_drains_new_work_is_turned_away_and_operators_are_answered(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        running = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        draining = asyncio.create_task(world.gateway.drain(10.0))
        await world_module.until(lambda: world.gateway.dispatcher.is_draining)
        for body in (BODY, BODY | {"stream": True}, {"not": "looked at"}):
            async with world.post("/v1/completions", body) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "5"
                assert response.headers["Connection"] == "close"
                assert "shutting down" in (await response.json())["error"]["message"]
        status, ready = await world.get("/ready")
        assert (status, ready["ready"], ready["problem"]) == (503, False, "draining")
        assert (await world.get("/health"))[0] == 200
        decode.finish(decode.request_id)
        assert (await running)[0] == 200
        await draining

    in_world(scenario)


def test_a_stop_at_once_tells_open_streams(in_world: Any, world_module: Any) -> None:
    """What a second signal does: `serving` ends while requests run."""
    seen: list[str] = []

    async def read(world: Any) -> None:
        async with world.post("/v1/completions", BODY | {"stream": True}) as response:
            async for line in response.content:
                seen.append(line.decode().strip())

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        reading = asyncio.create_task(read(world))
        await world_module.until(lambda: decode.of(GenerateRequest))
        decode.emit(decode.request_id, 2)
        await world_module.until(lambda: any(line.startswith("data: ") for line in seen))
        closing = asyncio.create_task(world.gateway.drain(0.0))
        await asyncio.wait([closing, reading])

    in_world(scenario)
    last = [line for line in seen if line.startswith("data: ")][-1]
    assert "this server has been shut down" in last


def test_draining_has_a_bound(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        running = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        await world.gateway.drain(0.1)
        assert (await running)[0] == 503
        await world_module.until(lambda: world.is_empty)

    in_world(scenario)
