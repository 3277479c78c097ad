"""Copies do not wait for forward passes: a stream of their own, of high priority."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from baton.engine.copy_stream import CopyStream


class FakeStream:
    def __init__(self, device: torch.device, priority: int):
        self.device, self.priority, self.num_waits = device, priority, 0

    def synchronize(self) -> None:
        self.num_waits += 1


def test_copies_go_before_the_kernels_of_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[FakeStream] = []

    @contextmanager
    def stream(made: FakeStream) -> Iterator[None]:
        entered.append(made)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    copies = CopyStream(torch.device("cuda", 0))
    with copies():
        (made,) = entered
    copies.wait()
    assert (made.device, made.num_waits) == (torch.device("cuda", 0), 1)
    assert made.priority < 0


def test_on_the_cpu_nothing_is_waited_for() -> None:
    copies = CopyStream(torch.device("cpu"))
    with copies():
        pass
    copies.wait()
