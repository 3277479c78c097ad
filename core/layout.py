"""BlockLayout: how many bytes one block of the KV cache takes, and in which order. Integers only."""

import msgspec

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class BlockLayout(msgspec.Struct, frozen=True):
    """Shape of one block: `[num_layers, 2 (key, value), num_kv_heads, block_size, head_dim]`, contiguous.

    A *token slot* is `block_id * block_size + offset`. A *piece* is what travels between workers: the keys and
    values of consecutive tokens in consecutive layers, `[layers, 2, num_kv_heads, num_tokens, head_dim]`, contiguous.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size {self.block_size} is not a power of two from 1 to 128")
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(ITEM_SIZES)}")

    @property
    def item_size(self) -> int:
        return ITEM_SIZES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        return self.piece_bytes(1, self.num_layers)

    def piece_bytes(self, num_tokens: int, num_layers: int) -> int:
        return num_tokens * num_layers * 2 * self.num_kv_heads * self.head_dim * self.item_size

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens (the last one may be partly filled)."""
        return -(-num_tokens // self.block_size)

    @property
    def wire_digest(self) -> str:
        """Equal for two workers exactly when a piece of one can be placed by the other (block sizes may differ)."""
        return f"{self.num_layers}x2x{self.num_kv_heads}x{self.head_dim}:{self.dtype}"
