"""Arrival times offer the asked load whatever the seed; loops start each session once and no more than allowed."""

import asyncio
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.arrivals import closed_loop, open_loop, poisson_arrivals
from baton.core.trace import scaled_arrivals


@given(st.integers(1, 300), st.floats(0.01, 1000), st.integers(0, 2**63))
def test_every_seed_takes_exactly_the_asked_time(count: int, duration: float, seed: int) -> None:
    times = poisson_arrivals(count, duration, seed)
    assert len(times) == count
    assert times[-1] == duration
    assert times == sorted(times)
    assert times[0] >= 0
    assert times == poisson_arrivals(count, duration, seed)


def test_gaps_are_exponential() -> None:
    times = poisson_arrivals(20_000, 10_000.0, seed=1)
    gaps = [later - sooner for sooner, later in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.5)
    assert statistics.pstdev(gaps) == pytest.approx(0.5, rel=0.05)  # exponential: deviation equals mean
    assert statistics.median(gaps) == pytest.approx(0.5 * 0.6931, rel=0.05)  # and the median is ln 2 of it


def test_seeds_differ() -> None:
    assert poisson_arrivals(10, 1.0, 1) != poisson_arrivals(10, 1.0, 2)


def test_no_arrivals() -> None:
    assert poisson_arrivals(0, 1.0, 0) == []
    assert scaled_arrivals([], 2.0) == []


def test_recorded_times_start_at_zero_and_keep_their_shape() -> None:
    assert scaled_arrivals([3.0, 3.0, 6.0, 15.0], None) == [0.0, 0.0, 3.0, 12.0]
    assert scaled_arrivals([3.0, 3.0, 6.0, 15.0], 8.0) == [0.0, 0.0, 0.125, 0.5]  # 4 requests at 8/s: 0.5 s


def test_simultaneous_times_cannot_be_stretched() -> None:
    assert scaled_arrivals([5.0, 5.0], 1.0) == [0.0, 0.0]


def test_closed_loop_holds_the_concurrency() -> None:
    running: set[int] = set()
    started: list[int] = []
    largest = 0

    async def session(index: int) -> None:
        nonlocal largest
        started.append(index)
        running.add(index)
        largest = max(largest, len(running))
        for _ in range(index % 3 + 1):
            await asyncio.sleep(0)
        running.remove(index)

    asyncio.run(closed_loop(20, 3, session))
    assert started == list(range(20))
    assert largest == 3
    assert not running


def test_open_loop_does_not_wait_for_the_server() -> None:
    async def scenario() -> list[int]:
        started: list[int] = []
        all_started = asyncio.Event()

        async def session(index: int) -> None:
            started.append(index)
            if len(started) == 4:
                all_started.set()
            await all_started.wait()  # nobody ends before the last has begun

        async with asyncio.timeout(10):
            await open_loop([0.0, 0.001, 0.001, 0.002], session)
        return started

    assert asyncio.run(scenario()) == [0, 1, 2, 3]


def test_open_loop_keeps_to_the_times() -> None:
    async def scenario() -> list[float]:
        clock = asyncio.get_running_loop()
        start = clock.time()
        times: list[float] = []

        async def session(_: int) -> None:
            times.append(clock.time() - start)

        await open_loop([0.0, 0.03, 0.06], session)
        return times

    times = asyncio.run(scenario())
    assert times[1] >= 0.03 - 1e-3
    assert times[2] >= 0.06 - 1e-3
