"""When sessions start: open loop (at given times, whatever the server does) or closed loop (at most N at once)."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate


def poisson_arrivals(count: int, duration_s: float, seed: int) -> list[float]:
    """`count` arrival times of a Poisson process in seconds, rescaled so that the last is exactly `duration_s`.

    The gaps are exponential, the first one included. Without the rescaling the offered load would differ by some
    percent from seed to seed; `vllm bench serve` does the same.
    """
    generator = random.Random(f"arrivals {seed}")
    times = list(accumulate(generator.expovariate(1.0) for _ in range(count)))
    return [time * duration_s / times[-1] for time in times[:-1]] + [duration_s] * bool(times)


async def open_loop(arrivals_s: Sequence[float], start_session: Callable[[int], Awaitable[None]]) -> None:
    """Starts session i at `arrivals_s[i]` seconds (ascending) from now and returns when all have ended."""
    clock = asyncio.get_running_loop()
    start = clock.time()
    async with asyncio.TaskGroup() as group:
        for index, arrival in enumerate(arrivals_s):
            await asyncio.sleep(start + arrival - clock.time())
            group.create_task(_as_coroutine(start_session(index)))


async def closed_loop(count: int, concurrency: int, start_session: Callable[[int], Awaitable[None]]) -> None:
    """Runs sessions 0 to `count` - 1, `concurrency` at once: the next starts when one ends."""
    waiting = iter(range(count))

    async def run_one_after_another() -> None:
        for index in waiting:  # shared: each index goes to one of the runners
            await start_session(index)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(run_one_after_another())


async def _as_coroutine(session: Awaitable[None]) -> None:
    await session
