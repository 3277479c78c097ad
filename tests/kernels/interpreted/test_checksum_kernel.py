"""The checksum kernel under the interpreter: the same 64 bits as its definition."""

import pytest
import torch

from baton.kernels import reference
from baton.kernels.gpu.checksum import checksum, checksum_cost

TILE_BYTES = 4 * 4096


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize(
    "size", [0, 1, 2, 3, 4, 5, 15, 16, 17, 123, TILE_BYTES - 1, TILE_BYTES, TILE_BYTES + 1, 5 * TILE_BYTES + 7]
)
def test_same_as_the_definition(size: int) -> None:
    buffer = random_bytes(size)
    result = checksum(buffer)
    assert result.dtype == torch.int64
    assert result.shape == ()
    assert result.item() == reference.checksum(buffer).item()


@pytest.mark.parametrize("value", [0, 255])
def test_equal_bytes(value: int) -> None:
    buffer = torch.full((TILE_BYTES + 6,), value, dtype=torch.uint8)
    assert checksum(buffer).item() == reference.checksum(buffer).item()


def test_more_tiles_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kernels.gpu.checksum._MAX_PROGRAMS", 3)
    buffer = random_bytes(7 * TILE_BYTES + 9)
    assert checksum(buffer).item() == reference.checksum(buffer).item()


def test_reads_its_buffer_only() -> None:
    outer = random_bytes(TILE_BYTES + 64)
    before = checksum(outer[16 : TILE_BYTES + 21])
    outer[:16] ^= 255
    outer[TILE_BYTES + 21 :] ^= 255
    assert torch.equal(checksum(outer[16 : TILE_BYTES + 21]), before)


def test_a_wrong_buffer_is_named() -> None:
    with pytest.raises(ValueError, match=r"buffer is torch\.float32"):
        checksum(torch.zeros(4))
    with pytest.raises(ValueError, match="buffer is not contiguous"):
        checksum(random_bytes(64)[::2])
    with pytest.raises(ValueError, match="multiple of 4 bytes"):
        checksum(random_bytes(64)[1:])


def test_cost() -> None:
    assert checksum_cost(123).bytes == 123
