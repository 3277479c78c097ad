"""The checksum's definition: what it must notice, and its value by an independent model in Python's integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kernels.reference import checksum

MASK_32, MASK_64 = (1 << 32) - 1, (1 << 64) - 1


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def model(data: bytes) -> int:
    total = len(data) * 0x2545F4914F6CDD1D
    for index in range(0, len(data), 4):
        key = (index // 4 + 2**31) * 0x9E3779B1 & MASK_32
        key = (key ^ key >> 16) * 0x85EBCA6B & MASK_32
        total += int.from_bytes(data[index : index + 4], "little") * (key ^ key >> 15)
    return total & MASK_64


def value(data: bytes) -> int:
    return int(checksum(as_tensor(data))) & MASK_64


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_it_is_what_the_model_says(data: bytes) -> None:
    assert value(data) == model(data)


def test_values_by_literal() -> None:
    """They are compared between workers, so they may not change within a version of the protocol."""
    assert value(b"") == 0
    assert value(b"baton") == model(b"baton") == 0xE66DE52E1CBBEFBB
    assert value(bytes(range(256)) * 4100) == 0xC6DD7D2CCB7A1414  # more than one chunk


@given(st.binary(min_size=1, max_size=200), st.data())
@settings(deadline=None)
def test_a_changed_bit_is_noticed(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    assert value(bytes(changed)) != value(data)


@given(st.binary(max_size=100), st.integers(1, 40))
@settings(deadline=None)
def test_zeros_before_or_after_are_noticed(data: bytes, count: int) -> None:
    assert value(data + bytes(count)) != value(data)
    assert value(bytes(count) + data) != value(data)


@given(st.binary(min_size=2, max_size=100), st.data())
@settings(deadline=None)
def test_a_cut_is_noticed(data: bytes, draw: st.DataObject) -> None:
    stop = draw.draw(st.integers(0, len(data) - 1))
    assert value(data[:stop]) != value(data)


@given(st.lists(st.binary(min_size=4, max_size=4), min_size=2, max_size=40, unique=True), st.data())
@settings(deadline=None)
def test_words_in_another_order_are_noticed(words: list[bytes], draw: st.DataObject) -> None:
    first, second = draw.draw(st.permutations(range(len(words))))[:2]
    swapped = list(words)
    swapped[first], swapped[second] = words[second], words[first]
    assert value(b"".join(swapped)) != value(b"".join(words))
    turned = words[1:] + words[:1]
    assert value(b"".join(turned)) != value(b"".join(words))


@pytest.mark.parametrize("distance", [16, 4096, 16384, 65536])
def test_exchanged_rows_are_noticed(distance: int) -> None:
    """Pieces repeat at powers of two, where weak keys would repeat too."""
    buffer = torch.randint(0, 256, (4 * distance,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    rows = buffer.view(4, distance)
    orders = ((0, 1, 2, 3), (1, 0, 2, 3), (2, 3, 0, 1), (3, 2, 1, 0))
    sums = {int(checksum(rows[list(order)].flatten())) for order in orders}
    assert len(sums) == 4


def test_a_buffer_at_any_address() -> None:
    outer = torch.arange(40, dtype=torch.uint8)
    for start in range(4):
        assert int(checksum(outer[start : start + 33])) == int(checksum(outer[start : start + 33].clone()))
        assert int(checksum(outer[start : start + 32])) == int(checksum(outer[start : start + 32].clone()))
