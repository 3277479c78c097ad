"""Pieces through a process group of torch, one group of two ranks for each ring: gloo on the CPU, NCCL between cards.

The receiver is rank 0, the sender rank 1; the default group is never used. A piece waits in the staging slot it was
gathered into until the group's thread has sent it; its receiver takes it into the slot of the same number. Both sides
work in the order of the KVPiece messages.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ...core.errors import ConfigurationError
from .group_store import GroupStore
from .pair_group import Group, PairGroup
from .ring_backend import PieceBuffer, ReceiverBackend, RingBackend, RingBroken, SenderBackend, StoreEntry

RECEIVER_RANK, SENDER_RANK = 0, 1
DEVICES = {"gloo": "cpu", "nccl": "cuda"}  # library |-> where the slots are
ALIGNMENT = 256  # of slots, so that a card reads and writes them in words of any size
ABORT_TAG = 2**31 - 1  # nobody ever sends with it
# torch reads these when it makes a group. A transfer group may fail at any time and must not take its process along:
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # wait() waits on the host, and raises at its deadline
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog tears nothing down
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nobody aborts the process when the watchdog is late
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


@dataclass(frozen=True)
class GroupSettings:
    """What a ring over a group needs from its surroundings."""

    library: str  # "gloo" or "nccl"
    listen_host: str  # where gloo listens
    num_slots: int
    slot_bytes: int
    form_deadline_s: float
    operation_deadline_s: float
    wake: Callable[[], None]


class _GroupEnd(RingBackend):
    """The staging slots of one end and the group that empties or fills them.

    Raises ConfigurationError when there is no memory for them.
    """

    def __init__(self, settings: GroupSettings, rank: int, name: str) -> None:
        self.transport = settings.library
        self.slot_bytes = settings.slot_bytes
        self._stride = -(-settings.slot_bytes // ALIGNMENT) * ALIGNMENT
        size, device = settings.num_slots * self._stride, DEVICES[settings.library]
        try:
            with _apart_from_steps(device):
                self._slots = torch.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch's OutOfMemoryError is one
            reason = str(error).splitlines()[0]
            raise ConfigurationError(f"no memory for a staging ring of {size / 2**20:.0f} MiB: {reason}") from error
        self._bytes = self._slots.numpy().data if settings.library == "gloo" else None
        self.group = PairGroup(
            name,
            lambda store: _form(settings, store, rank),
            settings.wake,
            settings.form_deadline_s,
            settings.operation_deadline_s,
        )

    @property
    def num_bytes(self) -> int:
        return self._slots.nbytes + self.group.num_bytes

    def slot(self, slot: int, num_bytes: int) -> Tensor:
        start = slot * self._stride
        return self._slots[start : start + num_bytes]

    def buffer(self, slot: int, num_bytes: int) -> PieceBuffer:
        start = slot * self._stride
        return self.slot(slot, num_bytes) if self._bytes is None else self._bytes[start : start + num_bytes]

    def check(self) -> None:
        self.group.check()

    def take_entries(self) -> list[StoreEntry]:
        return self.group.store.take_entries()

    def entry_arrived(self, entry: StoreEntry) -> None:
        self.group.store.entry_arrived(*entry)

    def close(self) -> None:
        self.group.close()

    def join(self, timeout_s: float) -> bool:
        return self.group.join(timeout_s)


class GroupSender(_GroupEnd, SenderBackend):
    def __init__(self, settings: GroupSettings, peer: str) -> None:
        super().__init__(settings, SENDER_RANK, f"{settings.library} to {peer}")

    def write(self, slot: int, num_bytes: int) -> PieceBuffer:
        return self.buffer(slot, num_bytes)

    def published(self, slot: int, num_bytes: int) -> None:
        self.group.send(self.slot(slot, num_bytes))


class GroupReceiver(_GroupEnd, ReceiverBackend):
    def __init__(self, settings: GroupSettings, peer: str) -> None:
        super().__init__(settings, RECEIVER_RANK, f"{settings.library} from {peer}")
        self._num_asked = 0
        self._number_of: dict[int, int] = {}  # slot |-> how many operations are done when its piece is there

    def announced(self, slot: int, num_bytes: int) -> None:
        if not 1 <= num_bytes <= self.slot_bytes:
            raise RingBroken(f"a piece of {num_bytes} bytes was announced for a slot of {self.slot_bytes}")
        self._num_asked += 1
        self._number_of[slot] = self._num_asked
        self.group.receive(self.slot(slot, num_bytes))

    def has_arrived(self, slot: int) -> bool:
        if self.group.num_done >= self._number_of[slot]:
            return True
        self.group.check()
        return False

    def read(self, slot: int, num_bytes: int, payload: memoryview | None) -> PieceBuffer:
        return self.buffer(slot, num_bytes)


def _apart_from_steps(device: str) -> AbstractContextManager[object]:
    """For allocations. What torch hands out for the compute stream is free only behind the steps that have been
    launched there, and slots are filled on streams that do not wait for steps."""
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()  # type: ignore[no-untyped-call]


# ---- the libraries -------------------------------------------------------------------------------------------------


def _form(settings: GroupSettings, store: GroupStore, rank: int) -> Group:
    deadline = timedelta(seconds=settings.form_deadline_s)
    if settings.library == "nccl":
        return NcclGroup(store, rank, deadline)
    return GlooGroup(store, rank, deadline, settings.listen_host)


class GlooGroup:
    """Blocks until the peer is there. Raises RuntimeError when it does not come.

    The wait for the peer's address can be ended from outside (GroupStore.end), that for its connection cannot: it takes
    half of `deadline` when the peer vanishes between the two.
    """

    num_bytes = 0  # gloo sends from and receives into the slots

    def __init__(self, store: GroupStore, rank: int, deadline: timedelta, listen_host: str) -> None:
        gloo: Any = torch.distributed.ProcessGroupGloo  # torch's stubs lack half of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=listen_host)]
        options._timeout = deadline / 10  # of one of its five tries to connect; the store and operations have others
        options._threads = 1
        self._peer = 1 - rank
        self._group = gloo(store, rank, 2, options)

    def send(self, data: Tensor, deadline: timedelta) -> None:
        self._group.send([data], self._peer, 0).wait(deadline)

    def receive(self, data: Tensor, deadline: timedelta) -> None:
        self._group.recv([data], self._peer, 0).wait(deadline)

    def abort(self) -> None:
        """Gloo's own abort interrupts nothing; an operation that misses its deadline ends all others of the group."""
        try:
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # as it should be

    def close(self) -> None:
        pass  # its sockets close with the last reference


class NcclGroup:
    """Each end needs a card of its own. Blocks until the peer is there, with a first message in both directions.

    Everything runs on a stream of its own: an operation makes the stream it is asked on wait for the peer, and forward
    passes must not.
    """

    def __init__(self, store: GroupStore, rank: int, deadline: timedelta) -> None:
        if not torch.distributed.is_nccl_available():
            raise RuntimeError("this build of torch has no NCCL")
        os.environ.update(NCCL_ENVIRONMENT)  # of this process only: workers have no other groups
        nccl: Any = torch.distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = deadline
        free_before, _ = torch.cuda.mem_get_info()
        self._peer = 1 - rank
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._group = nccl(store, rank, 2, options)
        try:
            self._greet(rank, deadline)
        except RuntimeError:
            self._group.abort()
            raise
        self.num_bytes = max(0, free_before - torch.cuda.mem_get_info()[0])  # others on this card blur it

    def send(self, data: Tensor, deadline: timedelta) -> None:
        with torch.cuda.stream(self._stream):
            self._group.send([data], self._peer, 0).wait(deadline)

    def receive(self, data: Tensor, deadline: timedelta) -> None:
        with torch.cuda.stream(self._stream):
            self._group.recv([data], self._peer, 0).wait(deadline)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.abort()  # not `shutdown`, which waits for the peer

    def _greet(self, rank: int, deadline: timedelta) -> None:
        """The library makes its communicator with the first message."""
        with torch.cuda.stream(self._stream):
            greeting = torch.zeros(1, dtype=torch.uint8, device=DEVICES["nccl"])
        first, second = (self.send, self.receive) if rank == RECEIVER_RANK else (self.receive, self.send)
        first(greeting, deadline)
        second(greeting, deadline)
