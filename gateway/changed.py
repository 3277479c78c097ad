"""Changed: the event that a response waits for, made for one that comes with every token."""

import asyncio
import math


class Changed:
    """An asyncio.Event for one waiter at a time. One timer serves many waits: each would cost one else."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._deadline = math.inf  # of the present wait; in the loop's time, as `_timer_at`

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self, timeout_s: float | None) -> bool:
        """Until it is set; False when that takes longer than `timeout_s` (None: any time)."""
        if self._is_set:
            return True
        loop = asyncio.get_running_loop()
        self._deadline = math.inf if timeout_s is None else loop.time() + timeout_s
        if self._deadline < self._timer_at:
            self.close()
            self._arm(loop)
        self._waiter = loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """No timer is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, self._timer_at = loop.call_at(self._deadline, self._on_time, loop), self._deadline

    def _on_time(self, loop: asyncio.AbstractEventLoop) -> None:
        """Of a wait that is over, perhaps: then it is put off to the end of the present one."""
        self._timer, self._timer_at = None, math.inf
        if self._waiter is None or self._waiter.done() or self._deadline == math.inf:
            return
        if loop.time() < self._deadline:
            self._arm(loop)
        else:
            self._waiter.set_result(False)
