"""Upload: arrays arrive as they were, aligned, and a host buffer is not refilled before its copy is done."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine import upload
from baton.engine.upload import Field, Packing, Upload

CPU = torch.device("cpu")
DTYPES = st.sampled_from([np.int64, np.int32, np.float64])


@given(st.lists(st.tuples(DTYPES, st.lists(st.integers(0, 5), min_size=1, max_size=2)), max_size=6))
def test_arrays_arrive_as_they_were_sent(drawn: list[tuple[type, list[int]]]) -> None:
    fields = [Field(f"f{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(drawn)]
    values = {f.name: (np.arange(np.prod(f.shape)) * 3 - i).reshape(f.shape) for i, f in enumerate(fields)}
    packing = Packing(fields)
    buffer = Upload(CPU, 0).send(packing, values)
    tensors = packing.tensors(buffer)
    assert list(tensors) == [f.name for f in fields]
    for field in fields:
        tensor = tensors[field.name]
        assert (tensor.data_ptr() - buffer.data_ptr()) % 16 == 0
        assert tensor.numpy().dtype == field.dtype
        assert np.array_equal(tensor.numpy(), values[field.name])


def test_tables_of_unequal_length_fill_rows_from_their_start() -> None:
    packing = Packing([Field("tables", np.int32, (3, 4)), Field("none", np.int32, (0, 4))])
    rows = [np.array([5, 6], np.int32), np.array([], np.int32), np.array([7, 8, 9, 10], np.int32)]
    tables = packing.tensors(Upload(CPU, 0).send(packing, {"tables": rows, "none": []}))["tables"]
    assert tables[0, :2].tolist() == [5, 6]
    assert tables[2].tolist() == [7, 8, 9, 10]


def test_lists_and_numbers_fill_too() -> None:
    packing = Packing([Field("list", np.float64, (2,)), Field("number", np.float64, (3,))])
    sent = packing.tensors(Upload(CPU, 8).send(packing, {"list": [0.7, 1e-300], "number": -np.inf}))
    assert sent["list"].tolist() == [0.7, 1e-300]
    assert sent["number"].tolist() == [-np.inf] * 3


def test_a_packing_that_begins_alike_lies_where_the_other_one_does() -> None:
    """What a decode graph relies on: only the last field's size changes from step to step."""

    def places(width: int) -> list[int]:
        fields = [Field("a", np.int64, (3,)), Field("b", np.int32, (3,)), Field("tables", np.int32, (3, width))]
        buffer = torch.zeros(4096, dtype=torch.uint8)
        return [t.data_ptr() - buffer.data_ptr() for t in Packing(fields).tensors(buffer).values()]

    assert places(4) == places(64) == [0, 32, 48]


class Recorded:
    """An event that the test lets pass."""

    def __init__(self, log: list[str], number: int):
        self._log, self._number = log, number

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._log.append(f"wait {self._number}")


def test_a_host_buffer_waits_for_its_own_copy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    count = iter(range(100))
    monkeypatch.setattr(upload, "record_event", lambda device: Recorded(log, next(count)))
    sender = Upload(CPU, 64)  # event 0 stands for "nothing copied yet" in both
    packing = Packing([Field("a", np.int64, (8,))])
    for _ in range(4):
        sender.send(packing, {"a": 1})
    assert log == ["wait 0", "wait 0", "wait 1", "wait 2"]


def test_the_event_of_a_copy_stands_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its host buffer would be filled anew while it is still being read."""
    sender = Upload(CPU, 64)
    at_event: list[int] = []

    def event(device: torch.device) -> Recorded:
        at_event.append(int(sender.buffer.view(torch.int64)[7]))
        return Recorded([], 0)

    monkeypatch.setattr(upload, "record_event", event)
    packing = Packing([Field("a", np.int64, (8,))])
    for number in (5, 6, 7):
        sender.send(packing, {"a": number})
    assert at_event == [5, 6, 7]


def test_a_larger_packing_makes_the_buffers_grow() -> None:
    sender = Upload(CPU, 64)
    small, large = (Packing([Field("a", np.int64, (size,))]) for size in (8, 1000))
    first = sender.send(small, {"a": 1})
    second = sender.send(large, {"a": 2})
    assert small.tensors(first)["a"].tolist() == [1] * 8  # still whole: a step may be reading it
    assert large.tensors(second)["a"].tolist() == [2] * 1000
    assert sender.send(small, {"a": 3}) is second
