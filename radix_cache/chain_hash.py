"""Chain hashes: one 64-bit number names a block and everything before it.

hash of block i = xxh3_64(hash of block i - 1 ‖ token ids of block i as little-endian uint32), where a hash enters as
its 8 canonical (big-endian) bytes and the hash before the first block is 0. Workers and gateways compute the same
numbers on any machine. They are hints (design decision 10): inside a cache a hit compares token ids.
"""

from collections.abc import Iterator, Sequence

from xxhash import xxh3_64_digest

from .token_key import BYTES_PER_TOKEN, TokenKey

ROOT_HASH = 0


def chain_hashes(token_ids: TokenKey | Sequence[int], block_size: int, parent: int = ROOT_HASH) -> list[int]:
    """One hash for each whole block of `token_ids`; `parent` is the hash of the block before them.

    Measured: 0.4 us a block of 16 tokens.
    """
    return list(iter_chain_hashes(TokenKey.of(token_ids).data, block_size, parent))


def iter_chain_hashes(data: bytes, block_size: int, parent: int = ROOT_HASH) -> Iterator[int]:
    """As `chain_hashes`, one at a time, for `data` as a TokenKey holds it."""
    block_bytes = block_size * BYTES_PER_TOKEN
    digest = parent.to_bytes(8, "big")
    for end in range(block_bytes, len(data) + 1, block_bytes):
        digest = xxh3_64_digest(digest + data[end - block_bytes : end])
        yield int.from_bytes(digest, "big")


class HashRun:
    """The chain hashes of blocks that entered the tree together, computed when first needed.

    Hashing 256 blocks takes as long as the rest of their insertion, and nobody inside the worker reads the hashes:
    so they are computed when events are drained, off the path of a request. A run keeps its tokens until then.
    Nodes of the tree that share a run (after a split) refer to ranges of it.
    """

    __slots__ = ("_after_run", "_after_stop", "_data", "_hash_before", "_hashes", "block_size", "num_blocks")

    def __init__(self, data: bytes, block_size: int, after_run: "HashRun | None" = None, after_stop: int = 0) -> None:
        """`data` (as in TokenKey) follows block `after_stop` - 1 of `after_run`; without one it starts at the root."""
        self.block_size = block_size
        self.num_blocks = len(data) // (block_size * BYTES_PER_TOKEN)
        self._data = data
        self._after_run = after_run
        self._after_stop = after_stop
        self._hash_before = ROOT_HASH
        self._hashes: list[int] | None = None

    def hashes(self, start: int, stop: int) -> list[int]:
        """Hashes of blocks `start` up to `stop` of this run."""
        return self._resolved()[start:stop]

    def hash_before(self, start: int) -> int:
        """Hash of the block before block `start`; ROOT_HASH if there is none."""
        hashes = self._resolved()
        return hashes[start - 1] if start else self._hash_before

    def _resolved(self) -> list[int]:
        if self._hashes is not None:
            return self._hashes
        unresolved = [self]  # this run and those before it; a loop, for chains may be long
        while (before := unresolved[-1]._after_run) is not None and before._hashes is None:
            unresolved.append(before)
        for run in reversed(unresolved):
            hashes = run._resolve()
        return hashes

    def _resolve(self) -> list[int]:
        if self._after_run is not None:
            self._hash_before = self._after_run.hash_before(self._after_stop)
        self._hashes = list(iter_chain_hashes(self._data, self.block_size, self._hash_before))
        self._data, self._after_run = b"", None
        return self._hashes
