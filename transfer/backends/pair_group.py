"""PairGroup: one two-rank process group of torch and the thread that waits for it.

    the loop  -- send/receive (queued) -->  thread: forms the group, then one operation after the other, in that order
    the loop  <-- num_done, failure ------

Forming, sending and receiving block, each with a deadline; the loop never does. A group that misses a deadline or whose
peer dies is of no use any more, so the thread ends. Nothing but the thread touches the group, except an abort.
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

from torch import Tensor

from .group_store import GroupStore
from .ring_backend import RingBroken

logger = logging.getLogger(__name__)

OVERDUE_S = 2.0  # what an operation may take beyond its own deadline before it is aborted from outside


class Group(Protocol):
    """A group of two as far as this module needs it; everything raises RuntimeError when the group breaks."""

    num_bytes: int  # device memory the library took for it

    def send(self, data: Tensor, deadline: timedelta) -> None:
        """Returns when `data` may be written again."""

    def receive(self, data: Tensor, deadline: timedelta) -> None:
        """Returns when `data` is there."""

    def abort(self) -> None:
        """From another thread: what blocks returns with an error."""

    def close(self) -> None:
        """No more operations."""


class PairGroup:
    """`form` makes the group from a store, blocking. `wake` is called, from the thread, when the loop should look."""

    def __init__(
        self,
        name: str,
        form: Callable[[GroupStore], Group],
        wake: Callable[[], None],
        form_deadline_s: float,
        operation_deadline_s: float,
    ) -> None:
        self.name = name
        self.num_done = 0  # operations that have ended well, in the order they were asked for
        self.store = GroupStore(wake, form_deadline_s)
        self._form = form
        self._wake = wake
        self._deadline = timedelta(seconds=operation_deadline_s)
        self._queue: SimpleQueue[tuple[bool, Tensor] | None] = SimpleQueue()
        self._group: Group | None = None
        self._failure = ""
        self._overdue_at = time.monotonic() + form_deadline_s + OVERDUE_S  # of what is under way; inf: nothing is
        self._lock = threading.Lock()  # so that an operation either sees the closing or is seen by it
        self._is_closing = False
        self._aborting: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # ---- the loop's side ---------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """What the library itself took for the group; 0 until it has formed."""
        return self._group.num_bytes if self._group is not None else 0

    def send(self, data: Tensor) -> None:
        self._queue.put((True, data))

    def receive(self, data: Tensor) -> None:
        self._queue.put((False, data))

    def check(self) -> None:
        """Raises RingBroken when the group has failed, or hangs past its deadlines."""
        if not self._failure and time.monotonic() > self._overdue_at:
            self._failure = "it hangs past its deadline"
            self._abort()
        if self._failure:
            raise RingBroken(f"{self.name} broke: {self._failure}")

    def close(self) -> None:
        """End the thread soon; what it waits for is aborted."""
        with self._lock:
            self._is_closing = True
            is_busy = self._overdue_at != float("inf")
        self.store.end()
        self._queue.put(None)
        if is_busy:
            self._abort()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end; False when one has not."""
        deadline = time.monotonic() + timeout_s
        for thread in (self._aborting, self._thread):
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _abort(self) -> None:
        """On a thread of its own: an abort may take long as well."""
        with self._lock:
            group = self._group
            if group is not None and self._aborting is None:
                self._aborting = threading.Thread(target=group.abort, name=f"{self.name} abort", daemon=True)
                self._aborting.start()

    # ---- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._group = self._form(self.store)
            self._overdue_at = float("inf")
            while (operation := self._queue.get()) is not None:
                with self._lock:
                    if self._is_closing:
                        break
                    self._overdue_at = time.monotonic() + self._deadline.total_seconds() + OVERDUE_S
                is_send, data = operation
                (self._group.send if is_send else self._group.receive)(data, self._deadline)
                self._overdue_at = float("inf")
                self.num_done += 1
                if not is_send:
                    self._wake()  # nobody waits for what has been sent
        except RuntimeError as error:  # what torch raises for everything that happens to a group
            self._failure = self._failure or str(error).splitlines()[0]
            self._overdue_at = float("inf")
            logger.debug("%s ended: %s", self.name, error)
        group, self._group = self._group, None
        if group is not None:
            group.close()
        del group  # its sockets and threads go here, not on the loop's thread
        self._wake()
