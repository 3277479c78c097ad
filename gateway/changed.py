"""Changed: the event that a response waits for, made for one that comes with every token."""

import asyncio
import math
from collections.abc import Callable


class Changed:
    """An asyncio.Event for one waiter at a time. One timer serves many waits: each would cost one else.

    `take`, when there is one, is called first while somebody waits, in the loop's next round, once for all changes
    until then: True says that it has seen to them. Then nobody is woken, and the wait has begun anew.
    """

    def __init__(self) -> None:
        self.take: Callable[[], bool] | None = None
        self._is_set = False
        self._waiter: asyncio.Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._timeout_s = math.inf  # of the present wait,
        self._deadline = math.inf  # and when it ends; in the loop's time, as `_timer_at`
        self._is_taking = False  # in the next round
        self._was_taken = False  # a change, since the timer was last looked at

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._is_set = True
        elif self.take is None:
            self._wake(waiter)
        elif not self._is_taking:
            self._is_taking = True
            waiter.get_loop().call_soon(self._take, waiter)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self, timeout_s: float | None) -> bool:
        """Until it is set; False when that takes longer than `timeout_s` (None: any time)."""
        if self._is_set:
            return True
        loop = asyncio.get_running_loop()
        self._timeout_s, self._was_taken = math.inf if timeout_s is None else timeout_s, False
        self._deadline = loop.time() + self._timeout_s
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

    def _take(self, waiter: "asyncio.Future[bool]") -> None:
        self._is_taking = False
        if waiter.done() or waiter is not self._waiter:  # it has been cancelled, or its time was over
            self._is_set = True
        elif self.take is not None and self.take():
            self._was_taken = True
        else:
            self._wake(waiter)

    def _wake(self, waiter: "asyncio.Future[bool]") -> None:
        self._is_set = True
        waiter.set_result(True)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, self._timer_at = loop.call_at(self._deadline, self._on_time, loop), self._deadline

    def _on_time(self, loop: asyncio.AbstractEventLoop) -> None:
        """Of a wait that is over or began anew, perhaps: then it is put off to the end of the present one."""
        self._timer, self._timer_at = None, math.inf
        if self._waiter is None or self._waiter.done() or self._deadline == math.inf:
            return
        if self._was_taken:  # at some time since: the wait is a little longer than asked for, never shorter
            self._was_taken, self._deadline = False, loop.time() + self._timeout_s
        if loop.time() < self._deadline:
            self._arm(loop)
        else:
            self._waiter.set_result(False)
