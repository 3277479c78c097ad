"""Clients that do not take what is written to them: tokens wait here, not in buffers, and become one chunk."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from baton.core.messages import GenerateRequest

NUM_TOKENS = 800
BODY = {"model": "tiny-llama", "prompt": "a", "stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture
def long_answer(answer: list[int]) -> list[int]:
    return (answer[:-1] * NUM_TOKENS)[:NUM_TOKENS]


@asynccontextmanager
async def client(world: Any) -> AsyncIterator[socket.socket]:
    """Has asked for an answer, and takes nothing of it; its kernel takes little."""
    host, port = world.url.removeprefix("http://").split(":")
    body = msgspec.json.encode(BODY)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (host, int(port)))
        await loop.sock_sendall(connection, head.encode() + body)
        yield connection


async def one_at_a_time(decode: Any, until: Any, num_tokens: int) -> None:
    """Each token has been handed to its stream before the next one comes."""
    await until(lambda: decode.of(GenerateRequest))
    request_id = decode.request_id
    for _ in range(num_tokens):
        decode.emit(request_id, 1)
        for _ in range(4):
            await asyncio.sleep(0)


async def read_on(connection: socket.socket, told: bytearray, until: Callable[[list[str]], bool]) -> list[str]:
    """Adds to `told` until its texts are enough; a piece of HTTP's chunked coding holds whole events."""
    loop = asyncio.get_running_loop()
    while not until(texts(told)):
        part = await loop.sock_recv(connection, 65536)
        assert part, "the answer has ended"
        told += part
    return texts(told)


def has_more_than(num_chunks: int, chunks: list[str]) -> bool:
    return len(chunks) > num_chunks


def texts(told: bytearray) -> list[str]:
    choices = [msgspec.json.decode(event)["choices"][0] for event in re.findall(rb"data: (\{.*\})\n\n", told)]
    return [choice["text"] for choice in choices if choice["finish_reason"] is None]


def test_what_comes_while_a_client_is_behind_becomes_one_chunk(
    in_world: Any, world_module: Any, tokenizer: Any, long_answer: list[int]
) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, answer=long_answer)
        async with client(world) as connection:
            await one_at_a_time(decode, world_module.until, NUM_TOKENS)
            told = bytearray()
            chunks = await read_on(connection, told, lambda _: b"[DONE]" in told)
        assert "".join(chunks) == tokenizer.decode(long_answer)
        assert len(chunks) < NUM_TOKENS / 2
        assert max(map(len, chunks)) > 100  # characters

    in_world(scenario)


def test_who_has_caught_up_gets_tokens_one_by_one_again(
    in_world: Any, world_module: Any, tokenizer: Any, long_answer: list[int]
) -> None:
    late = 10

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, answer=long_answer)
        async with client(world) as connection:
            await one_at_a_time(decode, world_module.until, NUM_TOKENS - late)
            told = bytearray()
            text = tokenizer.decode(long_answer[: NUM_TOKENS - late]).rstrip("\ufffd")
            chunks = await read_on(connection, told, lambda chunks: len("".join(chunks)) >= len(text))
            for _ in range(late - 1):
                decode.emit(decode.request_id, 1)
                num_chunks = len(chunks)
                chunks = await read_on(connection, told, partial(has_more_than, num_chunks))
                assert len(chunks) == num_chunks + 1
            decode.emit(decode.request_id, 1)
            chunks = await read_on(connection, told, lambda _: b"[DONE]" in told)
        assert "".join(chunks) == tokenizer.decode(long_answer)

    in_world(scenario)


def test_a_client_that_takes_no_token_is_dropped(
    in_world: Any, world_module: Any, long_answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.gateway.answering.CLIENT_STALL_S", 0.1)

    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, answer=long_answer)
        async with client(world):
            await one_at_a_time(decode, world_module.until, NUM_TOKENS - 1)  # the last one does not come
            await world_module.until(lambda: world.is_empty, "the generation of the stuck client has ended")
            assert decode.live == {}

    in_world(scenario)
