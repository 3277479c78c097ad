"""What a worker's radix tree tells the gateways: hints about who caches what (hashes are hints, tokens are truth)."""

import msgspec


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Consecutive full blocks entered the tree below the block whose chain hash is `parent` (0: the root)."""

    namespace: str
    parent: int
    hashes: list[int]  # one 64-bit chain hash a block
    token_ids: list[int]  # len(hashes) * block_size


class Evicted(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """These blocks left the tree."""

    namespace: str
    hashes: list[int]


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The tree is empty."""


CacheEvent = Stored | Evicted | Cleared
