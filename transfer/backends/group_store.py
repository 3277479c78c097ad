"""GroupStore: how the two ends of a process group find each other, over Baton's own authenticated channel.

PyTorch would have the rendezvous in a TCPStore, a port that anybody can write to. Here each end keeps a dictionary:
what it sets goes into it and, as a GroupKey, to the other end.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch.distributed

from ...core.errors import RemoteProtocolError
from ...core.handover_messages import MAX_GROUP_KEY_CHARACTERS, MAX_GROUP_VALUE_BYTES

MAX_ENTRIES = 256


class GroupStore(torch.distributed.Store):  # type: ignore[name-defined,misc]  # torch has no stub for it
    """Called by torch from the group's threads; by the loop through `take_entries`, `entry_arrived` and `end`.

    `wake` is called, from any thread, when there is an entry to take.
    """

    def __init__(self, wake: Callable[[], None], timeout_s: float) -> None:
        super().__init__()
        self._wake = wake
        self._timeout_s = timeout_s
        self._entries: dict[str, bytes] = {}
        self._untold: deque[tuple[str, bytes]] = deque()
        self._changed = threading.Condition()
        self._has_ended = False

    # ---- the loop's side ---------------------------------------------------------------------------------------

    def take_entries(self) -> list[tuple[str, bytes]]:
        with self._changed:
            untold = list(self._untold)
            self._untold.clear()
        return untold

    def entry_arrived(self, key: str, value: bytes) -> None:
        """Raises RemoteProtocolError when the other end says more than a group needs."""
        with self._changed:
            if len(self._entries) >= MAX_ENTRIES and key not in self._entries:
                raise RemoteProtocolError(f"more than {MAX_ENTRIES} store entries for one group")
            self._entries[key] = value
            self._changed.notify_all()

    def end(self) -> None:
        """Whoever waits for an entry is told that none will come."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    # ---- torch's side: the methods of Store that process groups call; RuntimeError is what they expect ----------

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if len(key) > MAX_GROUP_KEY_CHARACTERS or len(data) > MAX_GROUP_VALUE_BYTES:
            raise RuntimeError(f"a store entry of {len(key)} + {len(data)} bytes is longer than a message may carry")
        with self._changed:
            self._entries[key] = data
            self._untold.append((key, data))
            self._changed.notify_all()
        self._wake()

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._changed:
            return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """For `timeout_s` of this store: what torch asks for is the deadline of other things too."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while not all(key in self._entries for key in keys):
                if self._has_ended:
                    raise RuntimeError("the group is not needed any more")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise RuntimeError(f"the other end did not answer within {self._timeout_s:g} s")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._entries for key in keys)
