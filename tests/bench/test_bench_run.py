"""Whole loads against a fake server whose chunks come when the test says so."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from baton.bench.client import BenchClient, open_http
from baton.bench.options import BenchConfig, LoadOptions, TargetOptions, WorkloadOptions
from baton.bench.progress import LineProgress, LoadState
from baton.bench.record import RequestRecord
from baton.bench.report import Report
from baton.bench.run import run
from baton.core.errors import ConfigurationError

HEAD = Path(__file__).parents[1] / "data" / "mooncake_conversation_head.jsonl"
Fake = Any  # the FakeServer of conftest.py, which tests cannot import
BOUND_S = 20.0


def config(server: Fake, load: dict | None = None, target: dict | None = None, **workload: object) -> BenchConfig:
    sizes = {"num_requests": 6, "input_len": 5, "output_len": 3, **workload}
    return BenchConfig(
        server.url, WorkloadOptions(**sizes), LoadOptions(**(load or {})), TargetOptions(**(target or {}))
    )


def with_server(fake_server: type[Fake], scenario: Callable[[Fake], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(BOUND_S), fake_server() as server:
            return await scenario(server)

    return asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def failures(report: Report) -> list[str]:
    return [record.error for record in report.records if record.error is not None]


def test_closed_loop_of_token_ids(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        report = await run(config(server))
        assert failures(report) == []
        assert report.metrics.completed == 6
        assert report.metrics.total_input_tokens == 30
        assert report.metrics.total_output_tokens == 18
        assert report.metrics.total_cached_tokens == 6
        assert all(len(record.chunk_times_s) == 3 for record in report.records)
        assert not report.interrupted
        for body in server.bodies:
            assert len(body["prompt"]) == 5
            assert all(isinstance(token, int) and 0 <= token < 1000 for token in body["prompt"])
            assert (body["model"], body["max_tokens"], body["min_tokens"]) == ("fake", 3, 3)
            assert body["ignore_eos"] is True
            assert body["stream_options"] == {"include_usage": True}

    with_server(fake_server, scenario)


def test_text_where_no_vocabulary_is_known(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        server.models = {"data": [{"id": "other"}, {"id": "m"}]}
        await run(config(server, target={"model": "m"}))
        assert all(body["model"] == "m" and len(body["prompt"].split()) == 5 for body in server.bodies)
        server.bodies.clear()
        await run(config(server, target={"model": "m", "vocab_size": 64}))
        assert all(max(body["prompt"]) < 64 for body in server.bodies)

    with_server(fake_server, scenario)


def test_chat_conversations_repeat_the_answers(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        report = await run(
            config(server, {"concurrency": 1}, {"endpoint": "chat"}, workload="multi-turn", turns=2, num_requests=4)
        )
        assert failures(report) == []
        first, second, third, _ = (body["messages"] for body in server.bodies)
        assert [message["role"] for message in second] == ["user", "assistant", "user"]
        assert second[0] == first[0]
        assert second[1]["content"] == " w0 w1 w2"
        assert len(third) == 1
        assert [(record.session, record.turn) for record in report.records] == [(0, 0), (0, 1), (1, 0), (1, 1)]

    with_server(fake_server, scenario)


def test_completion_conversations_grow_as_text(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        await run(config(server, {"concurrency": 1}, workload="multi-turn", turns=3, num_requests=3))
        first, second, third = (body["prompt"] for body in server.bodies)
        assert second.startswith(first + " w0 w1 w2 ")
        assert third.startswith(second + " w0 w1 w2 ")

    with_server(fake_server, scenario)


def test_open_loop_sends_though_nothing_is_answered(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        async def wait_for_all(body: dict) -> AsyncIterator[bytes]:
            await until(lambda: len(server.bodies) == 6)
            for piece in (server.token("x", "length"), server.usage(5, 1), server.DONE):
                yield piece

        server.script = wait_for_all
        report = await run(config(server, {"rate": 200.0}, output_len=1))
        assert failures(report) == []
        assert report.metrics.duration_s >= 6 / 200
        assert report.metrics.max_send_lag_ms is not None
        assert max(record.scheduled_s or 0.0 for record in report.records) == 6 / 200

    with_server(fake_server, scenario)


def test_closed_loop_holds_its_concurrency(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        in_flight, largest, both = 0, 0, asyncio.Event()

        async def counted(body: dict) -> AsyncIterator[bytes]:
            nonlocal in_flight, largest
            in_flight += 1
            largest = max(largest, in_flight)
            if in_flight == 2:
                both.set()
            await both.wait()
            in_flight -= 1
            for piece in (server.token("x", "length"), server.usage(5, 1), server.DONE):
                yield piece

        server.script = counted
        assert failures(await run(config(server, {"concurrency": 2}, output_len=1))) == []
        assert largest == 2

    with_server(fake_server, scenario)


def test_trace_workload(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        asked = config(server, {"rate": 1000.0}, workload="trace", trace=HEAD, num_requests=20)
        report = await run(asked)
        assert failures(report) == []
        lengths = sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies)
        assert lengths == [(915, 355), (2012, 354), (2290, 316)]
        assert report.notes == ["17 of 20 trace rows exceed the context of 4096: left out"]
        assert report.metrics.max_send_lag_ms is not None

        closed = await run(config(server, {"concurrency": 4}, workload="trace", trace=HEAD, num_requests=20))
        assert closed.metrics.completed == len(lengths)
        assert closed.metrics.max_send_lag_ms is None

    with_server(fake_server, scenario)


def test_a_chunks_time_is_when_it_came(fake_server: type[Fake]) -> None:
    """Two chunks behind a gate each: the recorded times lie on the right sides of the openings."""

    async def scenario(server: Fake) -> None:
        gates = [asyncio.Event(), asyncio.Event()]

        async def gated(body: dict) -> AsyncIterator[bytes]:
            yield b": keep-alive\n\n"
            await gates[0].wait()
            yield server.token(" a")
            yield b": keep-alive\n\n"
            await gates[1].wait()
            last = server.token(" b", "length")
            yield last[:11]  # an event cut in the middle
            yield last[11:] + server.usage(5, 2) + server.DONE

        server.script = gated
        record = RequestRecord(session=0, turn=0, send_s=0.0)
        async with open_http() as http:
            client = BenchClient(http, server.url, "completions", BOUND_S)
            sending = asyncio.create_task(client.send(b"{}", 2, record))
            await until(lambda: len(server.bodies) == 1)
            first_opening = client.now()
            gates[0].set()
            await until(lambda: len(record.chunk_times_s) == 1)
            second_opening = client.now()
            gates[1].set()
            assert await sending == " a b"
            end = client.now()
        assert record.error is None
        assert record.send_s <= first_opening <= record.chunk_times_s[0] <= second_opening
        assert second_opening <= record.chunk_times_s[1] <= end
        assert record.ttft_s >= first_opening - record.send_s

    with_server(fake_server, scenario)


async def _cut(server: Fake, body: dict) -> AsyncIterator[bytes]:
    yield server.token("x")


async def _error_event(server: Fake, body: dict) -> AsyncIterator[bytes]:
    yield server.token("x")
    yield server.event({"error": {"message": "decode worker lost"}})


async def _short(server: Fake, body: dict) -> AsyncIterator[bytes]:
    yield server.token("x", "stop") + server.usage(5, 1) + server.DONE


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (_cut, "without finish_reason"),
        (_error_event, "error event: decode worker lost"),
        (_short, "1 output tokens"),
    ],
)
def test_each_kind_of_failure_is_recorded(
    fake_server: type[Fake], answer: Callable[[Fake, dict], AsyncIterator[bytes]], error: str
) -> None:
    async def scenario(server: Fake) -> None:
        server.script = lambda body: answer(server, body)
        report = await run(config(server, num_requests=2))
        assert len(failures(report)) == 2
        assert all(error in failure for failure in failures(report))
        assert report.metrics.completed == 0

    with_server(fake_server, scenario)


def test_http_errors_are_recorded(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        server.status = 429
        assert failures(await run(config(server, num_requests=1))) == ["HTTP 429: too busy"]

    with_server(fake_server, scenario)


def test_a_server_that_goes_silent_is_left_after_the_timeout(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        gone = asyncio.Event()

        async def silent(body: dict) -> AsyncIterator[bytes]:
            yield server.token("x")
            await gone.wait()

        server.script = silent
        (error,) = failures(await run(config(server, {"timeout": 0.2}, num_requests=1)))
        assert "no complete answer within 0.2 s (1 chunks came)" in error
        gone.set()

    with_server(fake_server, scenario)


def test_a_server_that_dies_in_mid_stream(fake_server: type[Fake]) -> None:
    async def serve_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\ndata: ")
        await writer.drain()
        writer.transport.abort()

    async def scenario() -> None:
        listener = await asyncio.start_server(serve_half, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        record = RequestRecord(session=0, turn=0, send_s=0.0)
        async with listener, open_http() as http, asyncio.timeout(BOUND_S):
            await BenchClient(http, f"http://127.0.0.1:{port}", "completions", BOUND_S).send(b"{}", 1, record)
        assert record.error is not None
        assert "after 0 chunks" in record.error

    asyncio.run(scenario())


def test_turns_after_a_failed_one_are_not_sent(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        server.script = lambda body: _cut(server, body)
        report = await run(config(server, workload="multi-turn", turns=3, num_requests=3))
        assert len(server.bodies) == 1
        assert len(report.records) == 3
        assert [record.error for record in report.records][1:] == [
            "not sent, since an earlier turn of its session failed"
        ] * 2

    with_server(fake_server, scenario)


def test_warm_up_is_left_out_and_its_failure_ends_the_benchmark(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        report = await run(config(server, {"warmup": 2}))
        assert len(server.bodies) == 8
        assert len(report.records) == 6
        server.status = 500
        with pytest.raises(ConfigurationError, match=r"warm-up request failed.*HTTP 500: too busy"):
            await run(config(server, {"warmup": 1}))

    with_server(fake_server, scenario)


def test_a_stop_keeps_what_had_ended(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        stop = asyncio.Event()

        async def only_two(body: dict) -> AsyncIterator[bytes]:
            if len(server.bodies) == 3:
                stop.set()
                await asyncio.Event().wait()  # until the client leaves
            yield server.token("x", "length") + server.usage(5, 1) + server.DONE

        server.script = only_two
        report = await run(config(server, {"concurrency": 1}, output_len=1), stop=stop)
        assert report.interrupted
        assert (report.metrics.completed, report.metrics.failed, report.unfinished) == (2, 0, 4)

        server.bodies.clear()
        already_stopped = await run(config(server, {"warmup": 3}), stop=stop)
        assert already_stopped.unfinished == 6

    with_server(fake_server, scenario)


def test_an_unknown_model_or_no_server_at_all(fake_server: type[Fake]) -> None:
    async def scenario(server: Fake) -> None:
        with pytest.raises(ConfigurationError, match="does not list the model x; it lists: fake"):
            await run(config(server, target={"model": "x"}))
        server.models = {"unexpected": 1}
        with pytest.raises(ConfigurationError, match="does not answer like an OpenAI server"):
            await run(config(server))
        server.models = None
        with pytest.raises(ConfigurationError, match="HTTP 404: no such route; name the model with --model"):
            await run(config(server))
        assert (await run(config(server, target={"model": "x"}))).metrics.completed == 6
        closed = config(server)
        await server.__aexit__()
        with pytest.raises(ConfigurationError, match=r"no server answers at http://127\.0\.0\.1"):
            await run(closed)

    with_server(fake_server, scenario)


@pytest.mark.parametrize(
    ("load", "workload", "named"),
    [
        ({"rate": 1.0, "concurrency": 2}, {}, "--rate and --concurrency"),
        ({"rate": 0.0}, {}, "--rate 0.0"),
        ({"rate": float("inf")}, {}, "--rate inf"),
        ({"concurrency": 0}, {}, "--concurrency 0"),
        ({"timeout": -1.0}, {}, "--timeout"),
        ({"warmup": -1}, {}, "--warmup"),
        ({}, {"num_requests": 0}, "--num-requests"),
        ({}, {"input_len": 0}, "--input-len"),
        ({}, {"output_len": 0}, "--output-len"),
        ({}, {"turns": 0}, "--turns"),
        ({}, {"workload": "trace"}, "--trace FILE"),
        ({}, {"trace": HEAD}, "--trace FILE"),
    ],
)
def test_impossible_options_are_named(load: dict, workload: dict, named: str) -> None:
    impossible = BenchConfig("http://h", WorkloadOptions(**workload), LoadOptions(**load))
    with pytest.raises(ConfigurationError, match=named):
        impossible.check()


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "h:1"])
def test_urls(url: str) -> None:
    assert BenchConfig(url).base_url == "http://h:1"


def test_progress_is_shown_while_nothing_ends(fake_server: type[Fake]) -> None:
    shown: list[LoadState] = []

    class Seen(LineProgress):
        def show(self, state: LoadState) -> None:
            shown.append(state)

    async def scenario(server: Fake) -> None:
        async def wait_until_shown(body: dict) -> AsyncIterator[bytes]:
            await until(lambda: any(state.in_flight == 2 for state in shown))
            yield server.token("x", "length") + server.usage(5, 1) + server.DONE

        server.script = wait_until_shown
        assert failures(await run(config(server, num_requests=2, output_len=1), Seen(io.StringIO()))) == []
        assert shown[-1].total == 2

    with_server(fake_server, scenario)
