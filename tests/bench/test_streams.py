"""The reader of many streams against the bare server: every chunk, every text, and what is no whole stream."""

import asyncio

import pytest
from aiohttp import web

from baton.bench.bare_server import bare_server, prebuilt_chunks
from baton.bench.streams import Pace, run_streams

TEXTS = ["Grüße", ", ", "", "世界", '"\n\n']


@pytest.mark.parametrize("yields", [True, False])
def test_every_stream_is_read_to_its_end(yields: bool) -> None:
    async def scenario() -> None:
        async with bare_server(prebuilt_chunks(TEXTS, "m"), yields=yields) as port:
            run = await run_streams(port, b"{}", 4)
        assert run.texts == ["".join(TEXTS)] * 4
        assert run.num_chunks == 4 * len(TEXTS)
        assert run.seconds > 0

    asyncio.run(scenario())


def test_at_a_pace_no_more_is_taken_than_it_says() -> None:
    pace = Pace(64, 0.001)

    async def scenario() -> None:
        chunks = prebuilt_chunks(TEXTS * 4, "m")
        async with bare_server(chunks, yields=False) as port:
            run = await run_streams(port, b"{}", 2, pace)
        assert run.texts == ["".join(TEXTS * 4)] * 2
        assert run.seconds >= (len(b"".join(chunks)) / pace.num_bytes - 2) * pace.interval_s

    asyncio.run(scenario())


def test_a_stream_without_an_end_is_told() -> None:
    async def scenario() -> None:
        async with bare_server(prebuilt_chunks(TEXTS, "m")[:-1], yields=True) as port:
            with pytest.raises(ValueError, match="cut off"):
                await run_streams(port, b"{}", 2)

    asyncio.run(scenario())


def test_a_refusal_is_told() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=503, text="too busy")

    async def scenario() -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", refuse)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            with pytest.raises(ValueError, match=r"503.*too busy"):
                await run_streams(runner.addresses[0][1], b"{}", 1)
        finally:
            await runner.cleanup()

    asyncio.run(scenario())
