"""PairGroup's watch over a library that does not keep its deadlines."""

import threading
import time
from datetime import timedelta

import pytest
import torch

from baton.transfer.backends import pair_group
from baton.transfer.backends.pair_group import PairGroup
from baton.transfer.backends.ring_backend import RingBroken


class Deaf:
    """A group whose operations end when it is aborted, and not before."""

    num_bytes = 0

    def __init__(self) -> None:
        self.is_busy = threading.Event()
        self.is_aborted = threading.Event()

    def send(self, data: torch.Tensor, deadline: timedelta) -> None:
        self.is_busy.set()
        assert self.is_aborted.wait(10.0)
        raise RuntimeError("aborted")

    receive = send

    def abort(self) -> None:
        self.is_aborted.set()

    def close(self) -> None:
        pass


def check_for(group: PairGroup, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        group.check()


def test_an_operation_that_ignores_its_deadline_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_group, "OVERDUE_S", 0.05)
    deaf, woken = Deaf(), threading.Event()
    group = PairGroup("gloo to decode-0", lambda store: deaf, woken.set, 5.0, 0.05)
    group.check()
    group.send(torch.zeros(1, dtype=torch.uint8))
    assert deaf.is_busy.wait(5.0)
    with pytest.raises(RingBroken, match="gloo to decode-0 broke: it hangs past its deadline"):
        check_for(group, 5.0)
    assert deaf.is_aborted.wait(5.0)
    assert group.join(5.0)
    with pytest.raises(RingBroken, match="it hangs"):
        group.check()
