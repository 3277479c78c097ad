"""Tokens that are text alone are written without waking their stream: all else, and every trouble, is left to it."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton.core.messages import GenerateRequest
from baton.gateway.changed import Changed
from baton.gateway.event_sink import EventSink
from baton.gateway.openai.formats import CompletionFormat
from baton.vocab.detokenizer import Detokenizer

BODY = {"model": "tiny-llama", "prompt": "a", "stream": True, "max_tokens": 500}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What sinks have written."""
    events: list[bytes] = []
    write = EventSink.write

    def write_and_note(self: EventSink, data: bytes) -> None:
        events.append(data)
        write(self, data)

    monkeypatch.setattr(EventSink, "write", write_and_note)
    return events


def test_a_token_without_text_does_not_end_a_stream_that_need_not_tell_it(
    in_world: Any, world_module: Any, tokenizer: Any, answer: list[int], written: list[bytes]
) -> None:
    """/v1/messages tells text alone, and half a character is none: an empty piece would be the end of the body."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        body = {
            "model": "tiny-llama",
            "max_tokens": 500,
            "stream": True,
            "messages": [{"role": "user", "content": "a"}],
        }
        async with world.http.post(f"{world.url}/v1/messages", json=body) as response:
            await world_module.until(lambda: decode.of(GenerateRequest))
            request_id = decode.request_id
            while request_id in decode.live:
                decode.emit(request_id, 1)
                for _ in range(20):  # rounds of the event loop: the token is written before the next one comes
                    await asyncio.sleep(0)
            whole = await response.read()
        events = [msgspec.json.decode(line[6:]) for line in whole.split(b"\n") if line.startswith(b"data: ")]
        text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        assert text == tokenizer.decode(answer)
        assert events[-1]["type"] == "message_stop"
        assert all(written)

    in_world(scenario, keep_alive_s=0.02)


async def answer_by_token(world: Any, until: Any, more: dict[str, Any]) -> bytes:
    """A streamed answer whose tokens come one after the other, each once the client has the one before."""
    _, decode = await world.pair(auto=False)
    whole = b""
    async with world.http.post(f"{world.url}/v1/completions", json=BODY | more) as response:
        await until(lambda: decode.of(GenerateRequest))
        request_id = decode.request_id
        while request_id in decode.live:
            num_events = whole.count(b"data: ")
            decode.emit(request_id, 1)
            while whole.count(b"data: ") == num_events:
                whole += await response.content.readany()
        return whole + await response.read()


async def raw_answer(world: Any, version: str) -> bytes:
    """All bytes of one answer, by a client that speaks this version of HTTP."""
    host, port = world.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = msgspec.json.encode(BODY)
    head = f"POST /v1/completions HTTP/{version}\r\nHost: h\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        return await asyncio.wait_for(reader.read(), 30.0)
    finally:
        writer.close()


def texts(events: bytes) -> list[str]:
    data = [event.removeprefix(b"data: ") for event in events.split(b"\n\n") if event.startswith(b"data: {")]
    choices = [choice for chunk in data for choice in msgspec.json.decode(chunk).get("choices", ())]
    return [choice["text"] for choice in choices if choice["finish_reason"] is None]


def test_the_tokens_between_the_first_and_the_last_are_written_at_once(
    in_world: Any, world_module: Any, tokenizer: Any, answer: list[int], written: list[bytes]
) -> None:
    async def scenario(world: Any) -> None:
        whole = await answer_by_token(world, world_module.until, {})
        detokenizer = Detokenizer(tokenizer)
        told = [detokenizer.push([token_id]) for token_id in answer[:-1]]  # the last one ends it, and is no text
        assert texts(whole)[: len(told)] == told
        assert texts(b"".join(written)) == told[1:]
        assert whole.endswith(b"data: [DONE]\n\n")

    in_world(scenario, keep_alive_s=0.02)


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ["zzzz"]},
        {"logprobs": 1},
        {"stream_options": {"continuous_usage_stats": True, "include_usage": True}},
        {"echo": True},
    ],
)
def test_what_is_more_than_text_is_left_to_the_stream(
    in_world: Any, world_module: Any, written: list[bytes], more: dict[str, Any]
) -> None:
    async def scenario(world: Any) -> None:
        assert (await answer_by_token(world, world_module.until, more)).endswith(b"data: [DONE]\n\n")
        assert written == []

    in_world(scenario, keep_alive_s=0.02)


def test_http_1_0_has_no_chunked_coding(in_world: Any, tokenizer: Any, answer: list[int], written: list[bytes]) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        head, _, body = (await raw_answer(world, "1.0")).partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert "".join(texts(body)) == tokenizer.decode(answer)
        assert written == []

    in_world(scenario, keep_alive_s=0.02)


def test_a_client_that_takes_nothing_is_left_to_the_stream(
    in_world: Any,
    world_module: Any,
    tokenizer: Any,
    answer: list[int],
    written: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(world: Any) -> None:
        monkeypatch.setattr(EventSink, "is_behind", lambda self, num_bytes: True)
        whole = await answer_by_token(world, world_module.until, {})
        assert "".join(texts(whole)) == tokenizer.decode(answer)
        assert written == []

    in_world(scenario, keep_alive_s=0.02)


def test_a_bug_in_spelling_reaches_the_client(
    in_world: Any,
    world_module: Any,
    answer: list[int],
    written: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spell: Callable[..., bytes] = CompletionFormat.delta

    def fails_at_the_third(self: CompletionFormat, delta: Any, usage: Any) -> bytes:
        if delta.token_ids == answer[2:3]:
            raise ValueError("a bug")
        return spell(self, delta, usage)

    async def scenario(world: Any) -> None:
        monkeypatch.setattr(CompletionFormat, "delta", fails_at_the_third)
        _, decode = await world.pair(auto=False)
        async with world.http.post(f"{world.url}/v1/completions", json=BODY) as response:
            await world_module.until(lambda: decode.of(GenerateRequest))
            decode.emit(decode.request_id, 1)
            whole = await response.content.readany()
            for _ in range(2):
                decode.emit(decode.request_id, 1)
            whole += await response.read()
        assert len(texts(whole)) == 2
        assert len(written) == 1
        assert b'"error"' in whole
        assert b"[DONE]" not in whole
        assert "a stream failed" in caplog.text

    in_world(scenario, keep_alive_s=0.02)


# ---- Changed -------------------------------------------------------------------------------------------------------


def test_who_takes_a_change_wakes_nobody() -> None:
    async def scenario() -> None:
        changed, answers, asked = Changed(), [True, True, False], []
        changed.take = lambda: asked.append(changed.is_set()) or answers.pop(0)  # type: ignore[func-returns-value]
        waiting = asyncio.create_task(changed.wait(60.0))
        for num_asked in (1, 2):
            await asyncio.sleep(0)
            changed.set()
            changed.set()  # once for both
            await asyncio.sleep(0)
            assert (len(asked), waiting.done()) == (num_asked, False)
        changed.set()
        assert await waiting
        assert asked == [False, False, False]
        assert changed.is_set()
        changed.close()

    asyncio.run(scenario())


def test_a_change_that_is_taken_begins_the_wait_anew() -> None:
    async def scenario() -> None:
        changed, loop = Changed(), asyncio.get_running_loop()
        changed.take = lambda: True
        waiting = asyncio.create_task(changed.wait(0.1))
        await asyncio.sleep(0)
        last = loop.time() + 0.08
        loop.call_at(last, changed.set)
        assert not await waiting
        assert loop.time() >= last + 0.1
        changed.close()

    asyncio.run(scenario())


def test_a_change_between_two_waits_is_not_lost() -> None:
    async def scenario() -> None:
        changed = Changed()
        changed.take = lambda: pytest.fail("nobody waits: it is for who comes next")
        waiting = asyncio.create_task(changed.wait(60.0))
        await asyncio.sleep(0)
        changed.set()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)
        assert changed.is_set()
        changed.close()

    asyncio.run(scenario())
