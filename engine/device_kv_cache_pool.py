"""DeviceKVCachePool: the KV cache in a GPU's memory, and the copies between its blocks and pieces anywhere.

Copies run on a stream of their own and are complete when a call returns, so they overlap with the forward passes on the
compute stream. The streams are not ordered by events, because callers keep them apart: `gather` is asked only for
layers that are computed (ModelRunner.progress), and `scatter` only for blocks that no step in flight reads or writes
(blocks are given up when the last step of their old owner is collected, and read when the hand-over is committed).
`copy_block` may copy slots that a step in flight writes; whoever gets the copy writes them anew before it reads them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigurationError, LocalProtocolError
from ..core.layout import BlockLayout
from ..kernels.gpu.block_copy import gather_tokens, scatter_tokens
from ..kernels.gpu.checksum import checksum
from .copy_stream import CopyStream
from .kv_cache_pool import KVCachePool, as_tensor


class DeviceKVCachePool(KVCachePool):
    """Buffers of pieces may be in the host's memory (a memoryview or a CPU tensor; fast if it is pinned) or on a
    device (a CUDA tensor, another card's memory mapped into this one included)."""

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device):
        self._device = device
        super().__init__(layout, num_blocks)
        self._copies = CopyStream(device)
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._ids = torch.empty(0, dtype=torch.int32)  # pinned: block ids on their way to the device

    def _allocate(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        try:
            return torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(self._device)
            raise ConfigurationError(
                f"a KV cache of {num_bytes:,} bytes was refused by the GPU, which has {free:,} bytes free: another "
                "process uses it. End that one, or give this worker a smaller share (--kv-memory)."
            ) from error

    def gather(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        out: memoryview | Tensor,
        first_layer: int = 0,
        last_layer: int | None = None,
    ) -> int:
        layers = self._layer_range(first_layer, last_layer)
        buffer = self._buffer(block_table, start, stop, out, layers)
        with self._copies():
            table, first = self._table(block_table, start, stop)
            piece = buffer if self._is_here(buffer) else self._staged(buffer.nbytes)
            gather_tokens(self._blocks, table, start - first, stop - first, layers.start, layers.stop, piece)
            if piece is not buffer:
                buffer.copy_(piece, non_blocking=True)
        self._copies.wait()
        return buffer.nbytes

    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        piece: memoryview | Tensor,
        first_layer: int = 0,
        last_layer: int | None = None,
    ) -> None:
        layers = self._layer_range(first_layer, last_layer)
        buffer = self._buffer(block_table, start, stop, piece, layers)
        with self._copies():
            table, first = self._table(block_table, start, stop)
            source = buffer
            if not self._is_here(buffer):
                source = self._staged(buffer.nbytes)
                source.copy_(buffer, non_blocking=True)
            scatter_tokens(self._blocks, table, start - first, stop - first, layers.start, layers.stop, source)
        self._copies.wait()

    def copy_block(self, source: int, target: int) -> None:
        with self._copies():
            super().copy_block(source, target)
        self._copies.wait()

    def checksum(self, piece: Tensor) -> int:
        with self._copies():
            return int(checksum(piece))  # waits for its stream

    def _buffer(
        self, block_table: Sequence[int], start: int, stop: int, buffer: memoryview | Tensor, layers: range
    ) -> Tensor:
        """The bytes of `buffer` that the piece takes, checked."""
        size = self.piece_bytes(stop - start, len(layers))
        if stop <= start or buffer.nbytes < size:
            raise LocalProtocolError(f"{stop - start} tokens take {size} bytes, the buffer has {buffer.nbytes}")
        self._check_tokens(block_table, start, stop)
        return (buffer if isinstance(buffer, Tensor) else as_tensor(buffer))[:size]

    def _table(self, block_table: Sequence[int], start: int, stop: int) -> tuple[Tensor, int]:
        """The blocks that hold the tokens, on the device, and the first token of the first of them."""
        size = self.layout.block_size
        ids = np.array(block_table[start // size : -(-stop // size)], np.int32)
        if len(ids) > len(self._ids):
            self._ids = torch.empty(2 * len(ids), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._ids[: len(ids)].copy_(torch.from_numpy(ids))  # free again: each call waits for its copies before it ends
        return self._ids[: len(ids)].to(self._device, non_blocking=True), start - start % size

    def _is_here(self, buffer: Tensor) -> bool:
        """Whether kernels of this device can reach it. Pinned host memory can be too, but a copy engine is faster."""
        return buffer.device.type == self._device.type

    def _staged(self, num_bytes: int) -> Tensor:
        if num_bytes > len(self._staging):
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._staging[:num_bytes]
