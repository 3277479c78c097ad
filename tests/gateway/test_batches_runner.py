"""BatchRunner without a gateway: how many lines run, what is retried, how batches are cut short, whose turn it is."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigurationError, LocalProtocolError, RequestError
from baton.gateway.batches import life, runner
from baton.gateway.batches.batch_table import new_batch_id
from baton.gateway.batches.database import Database, Tables
from baton.gateway.batches.file_table import new_file_id
from baton.gateway.batches.objects import Batch, FileObject, Purpose, Status
from baton.gateway.batches.runner import MAX_IN_FLIGHT, BatchRunner
from baton.gateway.generation import Unavailable

CHAT = "/v1/chat/completions"


class Answerer:
    """Answers with the body, at once or when `free` is set; does to a line what `troubles` says, first to last."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()
        self.asked: list[tuple[str, int]] = []
        self.ended: list[int] = []
        self.num_running = self.most_running = 0
        self.troubles: dict[int, list[Exception]] = {}

    async def answer(self, endpoint: str, owner: str, request_id: str, body: bytes) -> bytes:
        number = json.loads(body)["n"]
        self.asked.append((owner, number))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.free.wait()
            await asyncio.sleep(0)
            if self.troubles.get(number):
                raise self.troubles[number].pop(0)
            self.ended.append(number)
            return body
        finally:
            self.num_running -= 1


class Bench:
    """A database with a runner on top. `window_s`: how long batches have."""

    def __init__(self, folder: Path, window_s: float = 3600.0):
        self.database = Database(folder)
        self.answerer = Answerer()
        self.window_s = window_s
        self.runner = self.new_runner()

    def new_runner(self) -> BatchRunner:
        answerer: Any = self.answerer
        return BatchRunner(self.database, answerer, 10_000, lambda model: None)

    async def add(self, num_lines: int, owner: str = "", *, starts: bool = True) -> str:
        """A new batch; the number of a line is in its body."""
        lines = [{"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": {"n": n}} for n in range(num_lines)]
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        now = time.time()

        def add(tables: Tables) -> str:
            file_id, batch_id = new_file_id(), new_batch_id()
            with tables.files.new_draft(file_id) as draft:
                draft.write(text)
            tables.keep(owner, FileObject(file_id, 0, int(now), "x", Purpose.BATCH))
            batch = Batch(
                id=batch_id,
                endpoint=CHAT,
                model="m",
                input_file_id=file_id,
                completion_window="24h",
                created_at=int(now),
                expires_at=int(now + self.window_s),
            )
            tables.batches.add(owner, batch)
            return batch_id

        batch_id = await self.database.call(add)
        if starts:
            self.runner.start(owner, batch_id)
        return batch_id

    async def get(self, batch_id: str) -> Batch:
        return await self.database.call(lambda tables: tables.batches.known(batch_id))

    async def ended(self, batch_id: str) -> Batch:
        await until(lambda: batch_id not in self.runner._batches)
        return await self.get(batch_id)

    async def cancel(self, batch_id: str) -> None:
        def mark(tables: Tables) -> None:
            tables.batches.save(life.cancelled(tables.batches.known(batch_id), time.time()))

        await self.database.call(mark)
        self.runner.interrupt(batch_id)

    async def lines(self, file_id: str | None) -> list[Any]:
        if file_id is None:
            return []
        path = await self.database.call(lambda tables: tables.files.path(file_id))
        return [json.loads(line) for line in path.read_bytes().splitlines()]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def on_bench(tmp_path: Path) -> Callable[..., None]:
    def run(scenario: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            bench = Bench(tmp_path / "batches", **options)
            try:
                await scenario(bench)
            finally:
                await bench.runner.stop()
                bench.database.close()

        asyncio.run(main())

    return run


def test_a_bounded_number_runs_and_batches_take_turns(on_bench: Any) -> None:
    async def scenario(bench: Bench) -> None:
        bench.answerer.free.clear()
        first = await bench.add(200, "one")
        await until(lambda: bench.answerer.num_running == MAX_IN_FLIGHT)
        second = await bench.add(50, "two")
        while (await bench.get(second)).status is Status.VALIDATING:
            await asyncio.sleep(0.001)
        assert bench.answerer.num_running == MAX_IN_FLIGHT
        bench.answerer.free.set()
        for batch_id in (first, second):
            assert (await bench.ended(batch_id)).status is Status.COMPLETED
        assert bench.answerer.most_running == MAX_IN_FLIGHT
        # From when both were there, every other line was the second one's.
        owners = [owner for owner, _ in bench.answerer.asked[MAX_IN_FLIGHT:]]
        first_of_two = owners.index("two")
        assert first_of_two < 10
        assert 20 <= owners[first_of_two : first_of_two + 50].count("two") <= 30

    on_bench(scenario)


def test_overload_is_waited_for_and_is_no_error(on_bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)

    async def scenario(bench: Bench) -> None:
        bench.answerer.troubles = {
            0: [Unavailable("full", 429, 7)] * 30,
            1: [Unavailable("no worker", 503, 900)],
            2: [Unavailable("gave up")] * runner.MAX_FAILURES,
            3: [Unavailable("gave up")] * (runner.MAX_FAILURES + 1),
            4: [Unavailable("the worker failed", 500)],
            5: [RequestError("wrong", "top_p")],
            6: [RuntimeError("a bug")],
        }
        batch = await bench.ended(await bench.add(8))
        assert batch.status is Status.COMPLETED
        assert [line["custom_id"] for line in await bench.lines(batch.output_file_id)] == ["c0", "c1", "c2", "c7"]
        errors = await bench.lines(batch.error_file_id)
        assert [line["custom_id"] for line in errors] == ["c3", "c4", "c5", "c6"]
        assert [line["response"]["status_code"] for line in errors] == [503, 500, 400, 500]
        assert errors[2]["response"]["body"]["error"]["param"] == "top_p"
        assert "bug" not in json.dumps(errors)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (8, 4, 4)
        assert pauses.count(7) == 30
        assert {60.0, 2.0, 4.0, 8.0, 16.0, 32.0} <= set(pauses)
        assert max(pauses) == 60.0

    on_bench(scenario)


def test_cancelling_keeps_what_is_finished(on_bench: Any) -> None:
    async def scenario(bench: Bench) -> None:
        bench.answerer.troubles = {5: [RequestError("wrong")]}
        batch_id = await bench.add(200)
        await until(lambda: len(bench.answerer.ended) >= 100)
        bench.answerer.free.clear()
        await until(lambda: bench.answerer.num_running == MAX_IN_FLIGHT)
        await bench.cancel(batch_id)
        batch = await bench.ended(batch_id)
        assert batch.status is Status.CANCELLED
        assert batch.cancelled_at is not None
        assert batch.cancelling_at is not None
        assert bench.answerer.num_running == 0
        outputs = {line["custom_id"] for line in await bench.lines(batch.output_file_id)}
        assert outputs == {f"c{n}" for n in bench.answerer.ended}
        errors = await bench.lines(batch.error_file_id)
        assert errors[0]["custom_id"] == "c5"
        rest = [line for line in errors if line["error"] is not None]
        assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
        assert {line["custom_id"] for line in rest} | outputs | {"c5"} == {f"c{n}" for n in range(200)}
        assert (batch.request_counts.completed, batch.request_counts.failed) == (len(outputs), 1)

    on_bench(scenario)


def test_cancelling_at_any_moment_ends_in_cancelled(on_bench: Any) -> None:
    async def scenario(bench: Bench) -> None:
        bench.answerer.free.clear()
        for num_turns in range(40):
            batch_id = await bench.add(3)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await bench.cancel(batch_id)
            batch = await bench.ended(batch_id)
            assert batch.status is Status.CANCELLED
            assert batch.output_file_id is None

    on_bench(scenario)


def test_an_expired_batch_keeps_what_is_finished(on_bench: Any) -> None:
    async def scenario(bench: Bench) -> None:
        bench.answerer.troubles = {n: [Unavailable("full", 429, 50)] for n in range(3, 10)}
        batch = await bench.ended(await bench.add(10))
        assert batch.status is Status.EXPIRED
        assert batch.expired_at is not None
        assert [line["custom_id"] for line in await bench.lines(batch.output_file_id)] == ["c0", "c1", "c2"]
        errors = await bench.lines(batch.error_file_id)
        assert [line["custom_id"] for line in errors] == [f"c{n}" for n in range(3, 10)]
        assert {(line["response"], line["error"]["code"]) for line in errors} == {(None, "batch_expired")}

    on_bench(scenario, window_s=1.5)


def test_one_that_expired_while_nobody_looked(on_bench: Any) -> None:
    async def scenario(bench: Bench) -> None:
        batch_id = await bench.add(10, starts=False)
        await bench.runner.resume()
        batch = await bench.ended(batch_id)
        assert batch.status is Status.EXPIRED
        assert bench.answerer.ended == []

    on_bench(scenario, window_s=-5.0)


def test_a_stop_makes_lines_pending_again(on_bench: Any) -> None:
    async def scenario(bench: Bench) -> None:
        batch_id = await bench.add(300, "me")
        await until(lambda: len(bench.answerer.ended) >= 100)
        bench.answerer.free.clear()
        await until(lambda: bench.answerer.num_running == MAX_IN_FLIGHT)
        await bench.runner.stop()
        assert bench.answerer.num_running == 0
        stopped = await bench.get(batch_id)
        assert stopped.status is Status.IN_PROGRESS
        assert stopped.request_counts.completed == len(bench.answerer.ended)
        bench.runner.start("me", batch_id)  # a request that came late
        assert bench.answerer.num_running == 0
        bench.runner = bench.new_runner()
        bench.answerer.free.set()
        await bench.runner.resume()
        await bench.runner.resume()
        batch = await bench.ended(batch_id)
        assert batch.status is Status.COMPLETED
        assert sorted(bench.answerer.ended) == list(range(300))
        outputs = await bench.lines(batch.output_file_id)
        assert [line["custom_id"] for line in outputs] == [f"c{n}" for n in range(300)]

    on_bench(scenario)


def test_a_deleted_file_stays_as_long_as_a_batch_reads_it(on_bench: Any) -> None:
    async def scenario(bench: Bench) -> None:
        bench.answerer.free.clear()
        batch_id = await bench.add(100)
        await until(lambda: bench.answerer.num_running)
        file_id = (await bench.get(batch_id)).input_file_id
        await bench.database.call(
            lambda tables: tables.files.delete("", file_id, is_used=tables.batches.is_used(file_id))
        )
        with pytest.raises(RequestError):
            await bench.database.call(lambda tables: tables.files.get("", file_id))
        bench.answerer.free.set()
        batch = await bench.ended(batch_id)
        assert batch.request_counts.completed == 100
        path = await bench.database.call(lambda tables: tables.files.path(file_id))
        assert not path.exists()

    on_bench(scenario)


def test_one_gateway_at_a_time(on_bench: Any, tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.add(1)
        other = Database(tmp_path / "batches")
        assert other.exists
        with pytest.raises(ConfigurationError, match="--batch-dir"):
            await other.call(lambda tables: tables.batches.unfinished())
        other.close()

    on_bench(scenario)


def test_what_may_follow_what() -> None:
    batch = Batch(
        id="b", endpoint=CHAT, model="m", input_file_id="f", completion_window="24h", created_at=0, expires_at=9
    )
    legal = []
    for start in Status:
        batch.status = start
        for status in Status:
            try:
                moved = life.moved(batch, status, 5.7)
            except LocalProtocolError:
                continue
            assert (moved.status, getattr(moved, f"{status}_at")) == (status, 5)
            legal.append((start, status))
    assert legal == [
        ("validating", "failed"),
        ("validating", "in_progress"),
        ("validating", "expired"),
        ("validating", "cancelling"),
        ("in_progress", "finalizing"),
        ("in_progress", "expired"),
        ("in_progress", "cancelling"),
        ("finalizing", "completed"),
        ("cancelling", "cancelled"),
    ]
    over = {status for status in Status if life.is_over(status)}
    assert over == {"failed", "completed", "expired", "cancelled"}
