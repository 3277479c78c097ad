"""Faults that other servers shipped at their API, by the ids of their public reports.

What is elsewhere: AP01 AP02 AP03 AP06 AP12 AP19 AP25 AP32 in test_gateway_bad_input.py, AP16 there too (a template that
refuses), AP07 also in test_gateway_choices.py, AP13 AP14 AP15 AP34 AP36 AP37 in test_openai_choices.py, AP29 AP31 AP39
in test_openai_logprobs.py, ME01 in test_gateway_metrics.py (a broken measurement), ME03 in test_openai_keys.py.
"""

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest

from baton.core.messages import AbortRequest, GenerateRequest
from baton.vocab.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEEDED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 500},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}
ANSWER = "Grüße, 世界! Baton runs 🏃 and stops."


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stop_strings_over_tokens(in_world: Any, world_module: Any, path: str, answer: list[int]) -> None:
    """AP07: any stop string of the answer, told token by token: no part of it is ever emitted."""

    async def scenario(world: Any) -> None:
        await world.pair(chunk_size=1)
        for start in range(1, len(ANSWER) - 5, 3):
            stop = ANSWER[start : start + 5]
            asked = NEEDED[path] | {"stop": [stop, "not there"]}
            _, whole = await world.answer_to(path, asked)
            (choice,) = whole["choices"]
            expected = ANSWER[: ANSWER.index(stop)]
            assert (choice["text"] if "text" in choice else choice["message"]["content"]) == expected
            assert choice["finish_reason"] == "stop"
            async with world.post(path, asked | {"stream": True}) as response:
                assert text_of(world_module.sse_chunks(await response.read())) == expected

    in_world(scenario)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_characters_over_tokens(in_world: Any, world_module: Any, tokenizer: Tokenizer, path: str) -> None:
    """AP09: no half characters, in whatever pieces tokens come; those that are invalid stay as the tokenizer has it."""
    texts = ["🏃🏽‍♀️🇪🇺👩‍👩‍👧", "世界你好", "ẞß é", "a\u0301\u0000b"]
    ids = [*(tokenizer.encode(text) for text in texts), tokenizer.encode("世")[:-1] + tokenizer.encode("a")]

    async def scenario(world: Any) -> None:
        for number, token_ids in enumerate(ids):
            for size in (1, 2, 3, 7):
                worker = world.worker(f"decode-{number}-{size}", "decode", answer=token_ids, chunk_size=size)
                await world_module.until(lambda ref=worker.ref: ref in world.gateway.membership.workers)
                asked = NEEDED[path] | {"max_tokens": len(token_ids), "ignore_eos": True, "stream": True}
                async with world.post(path, asked) as response:
                    assert text_of(world_module.sse_chunks(await response.read())) == tokenizer.decode(token_ids)
                worker.leave()
                await world_module.until(lambda: not world.gateway.membership.workers)

    in_world(scenario, expected_prefill=0)


def test_nul_and_odd_characters_are_text(in_world: Any) -> None:
    """AP12, the part that is good input."""

    async def scenario(world: Any) -> None:
        await world.pair()
        for text in ("\x00", "a\x00b", "\ufffe\uffff", "\U0010ffff", "\u202e", "🏃"):
            for path, body in (
                (COMPLETIONS, {"prompt": text, "max_tokens": 1, "stop": text, "user": text}),
                (CHAT, {"messages": [{"role": "user", "content": text, "name": text}], "max_tokens": 1}),
            ):
                status, answer = await world.answer_to(path, body)
                assert status == 200, answer

    in_world(scenario)


def test_one_request_id_twice_at_once(in_world: Any, world_module: Any) -> None:
    """AP21: the client's id, in a header or in the body, is no key of anything."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        body = NEEDED[COMPLETIONS] | {"request_id": "mine", "id": "mine"}
        both = [
            asyncio.create_task(world.answer_to(COMPLETIONS, body, headers={"X-Request-Id": "mine"})) for _ in range(2)
        ]
        await world_module.until(lambda: len(decode.of(GenerateRequest)) == 2)
        for request_id in list(decode.live):
            decode.finish(request_id)
        answers = [await task for task in both]
        assert [status for status, _ in answers] == [200, 200]
        assert len({answer["id"] for _, answer in answers}) == 2
        assert world.is_empty

    in_world(scenario)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_huge_numbers_are_refused_at_once(in_world: Any, path: str) -> None:
    """AP23: and nobody else waits for it."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        started = time.monotonic()
        for more in (
            {"n": 129},
            {"n": 10**6},
            {"n": 2**63},
            {"best_of": 10**6},
            {"max_tokens": 10**18},
            {"max_tokens": 10**400},
            {"logprobs": 10**6},
            {"top_logprobs": 10**6, "logprobs": True},
            {"prompt": ["x"] * 10**5, "messages": [{"role": "user", "content": "x"}] * 10**4},
            {"prompt": ["x"] * 9, "n": 128, "messages": []},
            {"stop": ["x"] * 10**5},
            {"logit_bias": {str(i): 1 for i in range(10**4)}},
        ):
            status, body = await world.answer_to(path, NEEDED[path] | more)
            assert status == 400, (list(more), body)
        assert time.monotonic() - started < 10
        assert decode.of(GenerateRequest) == []
        started = time.monotonic()
        assert (await world.answer_to(path, NEEDED[path]))[0] == 200
        assert time.monotonic() - started < 1

    in_world(scenario)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
def test_errors_of_streams(in_world: Any, world_module: Any, path: str, n: int) -> None:
    """AP26: before the stream a plain HTTP error; in it one error event, then the end, without [DONE] or a reason."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        async with world.post(path, NEEDED[path] | {"n": 0, "stream": True}) as response:
            assert response.status == 400
            assert response.headers["Content-Type"].startswith("application/json")
        async with world.post(path, NEEDED[path] | {"n": n, "stream": True}) as response:
            assert response.status == 200
            await world_module.until(lambda: decode.of(GenerateRequest))
            request_id = decode.request_id
            decode.emit(request_id, 3)
            raw = await response.content.readuntil(b"\n\n")
            decode.refuse(request_id, "out of luck", retryable=False)
            raw += await response.read()
        *chunks, error = [json.loads(event) for event in world_module.sse_events(raw) if not event.startswith(":")]
        assert set(error) == {"error"}
        assert error["error"]["type"] == "server_error"
        assert b"[DONE]" not in raw
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        assert world.is_empty

    in_world(scenario, keep_alive_s=0.02)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_clients_that_do_not_wait(in_world: Any, world_module: Any, path: str) -> None:
    """AP27: whole answers and streams, one choice or several: whoever leaves takes the work along."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=256)
        for round_number in range(25):
            asked = [NEEDED[path] | {"n": n, "stream": stream} for n in (1, 3) for stream in (False, True)]
            clients = [asyncio.create_task(world.answer_to(path, body)) for body in asked]
            await world_module.until(lambda number=round_number: len(decode.of(GenerateRequest)) == 4 * (number + 1))
            for client in clients:
                client.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await client
            await world_module.until(lambda: world.is_empty, "the table is empty")
        aborted = {abort.request_id for abort in decode.of(AbortRequest)}
        assert aborted == {message.request.request_id for message in decode.of(GenerateRequest)}

    in_world(scenario)


def test_counts_that_cannot_be(in_world: Any, world_module: Any) -> None:
    """ME01: a worker that claims more cached tokens than the prompt has."""

    async def scenario(world: Any) -> None:
        await world.pair(cached_tokens=10_000)
        for path in (COMPLETIONS, CHAT):
            status, body = await world.answer_to(path, NEEDED[path] | {"n": 2})
            assert status == 200
            usage = body["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]

    in_world(scenario)
