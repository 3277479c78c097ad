"""KVCachePool: the memory of the KV cache, and the copies between its blocks and contiguous pieces."""

import mmap
import sys
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..core.errors import ConfigurationError, LocalProtocolError
from ..core.layout import BlockLayout
from ..kernels import reference

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# A shared mapping, the default on Unix, would count as shared memory, which containers limit.
_PRIVATE = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}


class KVCachePool:
    """`[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: a block is one contiguous piece of memory.

    A *piece* is `[num_layers, 2, num_kv_heads, num_tokens, head_dim]`, contiguous: it does not depend on block sizes,
    so a sender's and a receiver's may differ. Who owns which block is not known here.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int):
        if num_blocks < 1:
            raise ConfigurationError(f"a KV cache of {num_blocks} blocks holds nothing. Give it more memory.")
        self.layout = layout
        self.num_blocks = num_blocks
        self._blocks = self._allocate(num_blocks * layout.bytes_per_block, DTYPES[layout.dtype]).view(
            num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim
        )
        self.layers = tuple(self.layer(i) for i in range(layout.num_layers))

    def _allocate(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """Zeros. torch.zeros would write all of them (1.3 s for 800 MB); fresh pages are zero once they are touched."""
        try:
            memory = mmap.mmap(-1, num_bytes, **_PRIVATE)
        except OSError as error:
            raise ConfigurationError(
                f"a KV cache of {num_bytes:,} bytes was refused by the system: {error}. Ask for a smaller one."
            ) from error
        return torch.frombuffer(memory, dtype=dtype)

    def layer(self, index: int) -> Tensor:
        """The view `[num_blocks, 2, num_kv_heads, block_size, head_dim]` of one layer, with the pool's strides."""
        return self._blocks[:, index]

    def gather(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        out: memoryview | Tensor,
        first_layer: int = 0,
        last_layer: int | None = None,
    ) -> int:
        """Copy the tokens `start` to `stop` of a sequence into `out` as one piece; returns the bytes written.

        `out` is a writable buffer of bytes (memoryview, or a uint8 tensor) with room for the piece. Only the layers
        from `first_layer` up to, without, `last_layer` (None: all that follow) are copied.
        """
        layers = self._layer_range(first_layer, last_layer)
        piece = self._piece(out, stop - start, len(layers))
        for block, span, part in self._spans(block_table, start, stop, layers):
            piece[:, part].copy_(block[:, span])
        return piece.nbytes

    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        piece: memoryview | Tensor,
        first_layer: int = 0,
        last_layer: int | None = None,
    ) -> None:
        """Copy a piece into the slots of the tokens `start` to `stop` of a sequence; no other slot is touched."""
        layers = self._layer_range(first_layer, last_layer)
        source = self._piece(piece, stop - start, len(layers))
        for block, span, part in self._spans(block_table, start, stop, layers):
            block[:, span].copy_(source[:, part])

    def copy_block(self, source: int, target: int) -> None:
        """Copy all of a block into another one, which no step in flight uses."""
        self._blocks[target].copy_(self._blocks[source])

    def checksum(self, piece: Tensor) -> int:
        """Of the bytes of a tensor (uint8, contiguous), computed where they are: equal for equal bytes anywhere."""
        return int(reference.checksum(piece))

    def piece_bytes(self, num_tokens: int, num_layers: int | None = None) -> int:
        """Bytes of a piece of `num_layers` layers (None: all)."""
        layers = self.layout.num_layers if num_layers is None else num_layers
        return num_tokens * layers * self.layout.bytes_per_token // self.layout.num_layers

    def _layer_range(self, first: int, last: int | None) -> range:
        layers = range(first, self.layout.num_layers if last is None else last)
        if not layers or first < 0 or layers.stop > self.layout.num_layers:
            raise LocalProtocolError(f"layers {first} to {last} are not in {self.layout.num_layers} layers")
        return layers

    def _piece(self, buffer: memoryview | Tensor, num_tokens: int, num_layers: int) -> Tensor:
        """The start of a byte buffer as `[num_layers * 2 * num_kv_heads, num_tokens, head_dim]`, without a copy."""
        size = self.piece_bytes(num_tokens, num_layers)
        if num_tokens < 1 or buffer.nbytes < size:
            raise LocalProtocolError(f"{num_tokens} tokens take {size} bytes, the buffer has {buffer.nbytes}")
        data = buffer if isinstance(buffer, Tensor) else as_tensor(buffer)
        return data[:size].view(self._blocks.dtype).view(-1, num_tokens, self.layout.head_dim)

    def _spans(
        self, block_table: Sequence[int], start: int, stop: int, layers: range
    ) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield, block by block: its heads `[rows, block_size, head_dim]`, its slots, and the tokens of the piece."""
        size = self.layout.block_size
        self._check_tokens(block_table, start, stop)
        heads = self._blocks[:, layers.start : layers.stop].flatten(1, 3)
        for first in range(start - start % size, stop, size):
            begin, end = max(start, first), min(stop, first + size)
            block = heads[block_table[first // size]]
            yield block, slice(begin - first, end - first), slice(begin - start, end - start)

    def _check_tokens(self, block_table: Sequence[int], start: int, stop: int) -> None:
        size = self.layout.block_size
        if start < 0 or stop > len(block_table) * size:
            raise LocalProtocolError(f"tokens {start} to {stop} are not in {len(block_table)} blocks of {size}")


def as_tensor(buffer: memoryview) -> Tensor:
    """The bytes of a buffer as a uint8 tensor, without a copy."""
    if not buffer.readonly:
        return torch.frombuffer(buffer, dtype=torch.uint8)
    with warnings.catch_warnings():  # torch warns that it cannot mark the tensor read-only; nobody writes to it
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(buffer, dtype=torch.uint8)
