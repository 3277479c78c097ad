"""Clients that leave, workers that die, refuse or lose messages: every request ends, and ends as it should."""

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest

from baton.core.messages import AbortRequest, GenerateRequest, PrefillRequest, Role, TokenChunk
from baton.core.request import FinishReason

ANSWER = "Grüße, 世界! Baton runs 🏃 and stops."
BODY = {"prompt": "hi", "max_tokens": 500, "seed": 7}
STREAM = BODY | {"stream": True}
PATHS = ("/v1/completions", "/v1/chat/completions")


async def read(world: Any, body: Any) -> bytes:
    async with world.post("/v1/completions", body) as response:
        return await response.read()


def text_of(world_module: Any, raw: bytes) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in world_module.sse_chunks(raw))


# ---- clients that leave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 4])
def test_a_client_that_leaves_aborts_on_both_workers(
    in_world: Any, world_module: Any, stream: bool, num_tokens: int
) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.pair(auto=False)
        client = asyncio.create_task(world.answer_to("/v1/completions", BODY | {"stream": stream}))
        await world_module.until(lambda: decode.of(GenerateRequest))
        request_id = decode.request_id
        if num_tokens:
            decode.emit(request_id, num_tokens)
            await world_module.until(world.channel.inbox.empty, "the gateway has read the tokens")
        client.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await client
        await world_module.until(lambda: world.is_empty, "the table is empty")
        assert [m.request_id for m in decode.of(AbortRequest)] == [request_id]
        # Prefill is told unless it has done its part.
        assert [m.request_id for m in prefill.of(AbortRequest)] == ([] if num_tokens else [request_id])

    in_world(scenario)


def test_a_client_that_leaves_the_queue(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        client = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: world.gateway.dispatcher.num_queued == 1)
        client.cancel()
        await world_module.until(lambda: world.is_empty)
        _, decode = await world.pair()
        assert decode.of(GenerateRequest) == []

    in_world(scenario)


def test_a_stop_string_ends_the_work(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        client = asyncio.create_task(world.answer_to("/v1/completions", BODY | {"stop": "Baton"}))
        await world_module.until(lambda: decode.of(GenerateRequest))
        request_id = decode.request_id
        decode.emit(request_id, 30)
        _, body = await client
        assert body["choices"][0]["text"] == "Grüße, 世界! "
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] < 30
        assert [m.request_id for m in decode.of(AbortRequest)] == [request_id]
        assert world.is_empty

    in_world(scenario)


def test_a_connection_that_ends_is_looked_into_before_the_next_beat(
    in_world: Any, world_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.gateway.cluster.BEAT_INTERVAL_S", 1000.0)

    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        await world_module.until(lambda: world.gateway.probe.ready, "it is ready")
        decode.die()
        await world_module.until(lambda: not world.gateway.probe.ready, "the dead worker is missed")
        assert (await world.get("/ready"))[0] == 503

    in_world(scenario)


# ---- decode workers that die --------------------------------------------------------------------------------------


def test_a_running_request_that_its_worker_gives_up_goes_on_without_delay(
    in_world: Any, world_module: Any, answer: list[int]
) -> None:
    """A worker that thought this gateway gone drops its requests and says so: that is no refusal by a busy worker."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        stream = asyncio.create_task(read(world, STREAM))
        await world_module.until(lambda: decode.of(GenerateRequest))
        first_id = decode.request_id
        decode.emit(first_id, 4)
        decode.auto = True
        decode.refuse(first_id, "the gateway was silent", retryable=True)
        assert text_of(world_module, await stream) == ANSWER
        again = [m for m in decode.of(GenerateRequest) if m.request.namespace != "probe"][-1]
        assert again.request.output_token_ids == answer[:4]
        assert world.gateway.dispatcher.num_queued == 0

    in_world(scenario)


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("how", ["leave", "die", "restart"])
def test_a_stream_goes_on_elsewhere(
    in_world: Any, world_module: Any, answer: list[int], num_tokens: int, how: str
) -> None:
    async def scenario(world: Any) -> None:
        prefill, first = await world.pair(auto=False)
        stream = asyncio.create_task(read(world, STREAM))
        await world_module.until(lambda: first.of(GenerateRequest))
        first_id = first.request_id
        if num_tokens:
            first.emit(first_id, num_tokens)
        if how == "restart":
            second = world.worker("decode-0", Role.DECODE, incarnation=2)
        else:
            second = world.worker("decode-1", Role.DECODE)
            await world_module.until(lambda: len(world.gateway.membership.workers) == 3)
            if how == "leave":
                first.leave()
            else:
                first.die()
                world.gateway.cluster.send(first.ref, AbortRequest("any", "notices that it is gone"))
        raw = await stream
        assert text_of(world_module, raw) == ANSWER
        (again,) = second.of(GenerateRequest)
        assert again.request.output_token_ids == answer[:num_tokens]
        assert again.request.sampling.seed == 7
        assert again.request.request_id != first_id
        assert prefill.of(PrefillRequest)[1].token_ids == again.request.prompt_token_ids + answer[:num_tokens]
        assert len(prefill.of(AbortRequest)) == (0 if num_tokens else 1)
        assert world.is_empty

    in_world(scenario)


@pytest.mark.parametrize("path", PATHS)
def test_no_decode_worker_is_left(in_world: Any, world_module: Any, path: str) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        body |= {"max_tokens": 9}
        async with world.post(path, body | {"stream": True}) as response:
            assert response.status == 200  # the keep-alive time has passed
            decode.emit(decode.request_id, 5)
            decode.leave()
            events = world_module.sse_events(await response.read())
        error = msgspec.json.decode(events[-1])["error"]
        assert error["code"] == "unavailable"
        assert "decode" in error["message"]
        assert "[DONE]" not in events
        chunks = [msgspec.json.decode(e) for e in events[:-1] if not e.startswith(":")]
        assert len(chunks) >= 1
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        async with world.post(path, body) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "server_error"
        assert world.is_empty

    in_world(scenario, max_queue_delay_s=0.3, keep_alive_s=0.02)


def test_a_worker_that_is_late_is_told_to_stop(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        decode.say(TokenChunk("unknown", 0, 0, [5]))
        await world_module.until(lambda: decode.of(AbortRequest))
        assert decode.of(AbortRequest)[0].request_id == "unknown"

    in_world(scenario)


# ---- prefill workers that die -------------------------------------------------------------------------------------


def test_a_dead_prefill_worker_costs_nothing_here(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.pair(auto=False)
        request = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        prefill.leave()
        await world_module.until(lambda: len(world.gateway.membership.workers) == 1)
        decode.finish(decode.request_id)
        status, body = await request
        assert (status, body["choices"][0]["text"]) == (200, ANSWER)
        assert len(decode.of(GenerateRequest)) == 1
        decode.auto = True
        status, body = await world.answer_to("/v1/completions", BODY)
        assert (status, body["choices"][0]["text"]) == (200, ANSWER)
        assert decode.of(GenerateRequest)[1].prefill is None

    in_world(scenario)


@pytest.mark.parametrize("dead", ["prefill", "decode"])
def test_a_worker_that_cannot_be_reached_is_passed_over(in_world: Any, world_module: Any, dead: str) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.pair()
        spare = world.worker("decode-1", Role.DECODE)
        await world_module.until(lambda: len(world.gateway.membership.workers) == 3)
        (prefill if dead == "prefill" else decode).die()
        for _ in range(2):
            status, body = await world.answer_to("/v1/completions", BODY)
            assert (status, body["choices"][0]["text"]) == (200, ANSWER)
        requests = decode.of(GenerateRequest) + spare.of(GenerateRequest)
        assert len(requests) == 2
        assert all((m.prefill is None) == (dead == "prefill") for m in requests)
        assert world.is_empty

    in_world(scenario)


# ---- refusals, lost and repeated messages -------------------------------------------------------------------------


def test_a_refusal_is_tried_elsewhere(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        request = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        spare = world.worker("decode-1", Role.DECODE)
        await world_module.until(lambda: len(world.gateway.membership.workers) == 3)
        decode.refuse(decode.request_id, "this worker is leaving", retryable=True)
        status, body = await request
        assert (status, body["choices"][0]["text"]) == (200, ANSWER)
        assert len(spare.of(GenerateRequest)) == 1

    in_world(scenario)


def test_refusals_end(in_world: Any, world_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that always refuses is asked again and again, but not for longer than a request may wait."""
    monkeypatch.setattr("baton.gateway.placement.PAUSE_S", 0.01)

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        request = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        asked = 0
        while not request.done():
            await world_module.until(lambda n=asked: request.done() or len(decode.of(GenerateRequest)) > n)
            if not request.done():
                decode.refuse(decode.request_id, "this worker's queue is full", retryable=True)
                asked += 1
        status, body = await request
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert 2 <= asked <= 60
        assert world.is_empty

    in_world(scenario, max_queue_delay_s=0.6)


def test_a_refused_request_waits_for_another_worker(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        request = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        decode.refuse(decode.request_id, "this worker is leaving", retryable=True)
        await world_module.until(lambda: world.gateway.dispatcher.num_queued == 1)
        decode.leave()
        other = world.worker("decode-1", Role.DECODE)
        status, body = await request
        assert (status, body["choices"][0]["text"]) == (200, ANSWER)
        assert len(other.of(GenerateRequest)) == len(decode.of(GenerateRequest)) == 1

    in_world(scenario)


def test_workers_that_keep_dying_end_it(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        request = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        for life in range(2, 5):
            await world_module.until(lambda d=decode: d.of(GenerateRequest))
            decode = world.worker("decode-0", Role.DECODE, auto=False, incarnation=life)
        status, body = await request
        assert status == 503
        assert "gave up after 3 attempts" in body["error"]["message"]
        assert world.is_empty

    in_world(scenario)


def test_workers_that_come_and_go(in_world: Any, world_module: Any) -> None:
    """Every request ends well although a decode worker joins or leaves all the time."""

    async def scenario(world: Any) -> None:
        await world.pair()
        requests = [asyncio.create_task(world.answer_to("/v1/completions", BODY)) for _ in range(60)]
        coming = None
        for life in range(1, 40):
            if coming is not None:
                coming.leave()
            coming = world.worker("decode-1", Role.DECODE, incarnation=life)
            await asyncio.sleep(0)
        answers = await asyncio.gather(*requests)
        assert {(status, body["choices"][0]["text"]) for status, body in answers} == {(200, ANSWER)}
        assert world.is_empty

    in_world(scenario)


def test_a_final_failure_is_not_repeated(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        request = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        decode.refuse(decode.request_id, "no such layer", retryable=False)
        status, body = await request
        assert status == 500
        assert body["error"]["type"] == "server_error"
        assert len(decode.of(GenerateRequest)) == 1
        assert world.is_empty

    in_world(scenario)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_fails_fails_its_request(in_world: Any, world_module: Any, path: str, stream: bool) -> None:
    """Fewer choices than `n` are no answer, though one was complete: the client is told, and never a shorter list."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        prompt = {"prompt": "hi"} if "chat" not in path else {"messages": [{"role": "user", "content": "hi"}]}
        body = prompt | {"max_tokens": 500, "seed": 7, "n": 2, "stream": stream}

        async def read() -> tuple[int, bytes]:
            async with world.post(path, body) as response:
                return response.status, await response.read()

        request = asyncio.create_task(read())
        await world_module.until(lambda: decode.of(GenerateRequest))
        request_id = decode.request_id
        decode.emit(request_id, 500, choice=0)
        decode.emit(request_id, 2, choice=1)
        await world_module.until(world.channel.inbox.empty, "the gateway has read the tokens")
        decode.refuse(request_id, "no such layer", retryable=False)
        status, raw = await request
        if stream:
            assert status == 200
            *events, last = [event for event in world_module.sse_events(raw) if not event.startswith(":")]
            chunks = [msgspec.json.decode(event)["choices"][0] for event in events]
            assert [c["index"] for c in chunks if c["finish_reason"] is not None] == [0]
            error = msgspec.json.decode(last)["error"]
        else:
            assert status == 500
            error = msgspec.json.decode(raw)["error"]
        assert error["type"] == "server_error"
        assert world.is_empty

    in_world(scenario)


def test_repeated_chunks_are_dropped_and_a_gap_starts_again(
    in_world: Any, world_module: Any, answer: list[int]
) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        request = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        request_id = decode.request_id
        decode.emit(request_id, 4)
        decode.emit(request_id, 4, index=0)
        decode.emit(request_id, 4, index=2)  # two known ones and two new ones
        decode.auto = True
        decode.emit(request_id, 2, index=9)  # 6, 7 and 8 are lost
        status, body = await request
        assert (status, body["choices"][0]["text"]) == (200, ANSWER)
        assert decode.of(GenerateRequest)[1].request.output_token_ids == answer[:6]
        assert body["usage"]["completion_tokens"] == len(answer)
        assert [m.request_id for m in decode.of(AbortRequest)] == [request_id]

    in_world(scenario)


def test_an_answer_that_was_complete_is_not_sent_again(
    in_world: Any, world_module: Any, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker dies between the last token and the word that it was the last."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        monkeypatch.setattr("baton.gateway.placement.PAUSE_S", 0.0)
        for max_tokens, reason in ((3, "length"), (500, "stop")):
            request = asyncio.create_task(world.answer_to("/v1/completions", BODY | {"max_tokens": max_tokens}))
            await world_module.until(lambda: [r for r in decode.live if decode.live[r].request.namespace != "probe"])
            tokens = answer[:max_tokens]
            decode.say(TokenChunk(decode.request_id, 0, 0, tokens, None, 0))
            decode.say(TokenChunk(decode.request_id, 0, len(tokens) + 5, [5]))
            status, body = await request
            assert (status, body["choices"][0]["finish_reason"]) == (200, reason)

    in_world(scenario)


def test_an_unwanted_abort_starts_again(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        request = asyncio.create_task(world.answer_to("/v1/completions", BODY))
        await world_module.until(lambda: decode.of(GenerateRequest))
        decode.auto = True
        decode.say(TokenChunk(decode.request_id, 0, 0, [], FinishReason.ABORT))
        status, body = await request
        assert (status, body["choices"][0]["text"]) == (200, ANSWER)

    in_world(scenario)


def test_a_stalled_request_is_given_up(in_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.gateway.dispatcher.STALL_S", 0.1)

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        status, body = await world.answer_to("/v1/completions", BODY)
        assert status == 503
        assert "progress" in body["error"]["message"]
        assert len(decode.of(AbortRequest)) == 1
        assert world.is_empty

    in_world(scenario)
