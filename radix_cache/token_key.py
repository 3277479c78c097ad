"""TokenKey: token ids packed once per request, so that comparing prefixes is one memcmp."""

import sys
from array import array
from collections.abc import Sequence

BYTES_PER_TOKEN = 4


class TokenKey:
    """Token ids as little-endian uint32 bytes, immutable.

    Packing a list of 8,192 Python ints takes about 90 us, more than the match itself (about 10 us), so whoever
    looks up the same tokens more than once (queue order, match, insert, hashing) builds the key once and passes it.
    """

    __slots__ = ("data", "num_tokens")

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Raises ValueError if a token id is not an integer from 0 to 2**32 - 1."""
        try:
            packed = array("I", token_ids)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error
        if sys.byteorder == "big":
            packed.byteswap()
        self.data = packed.tobytes()
        self.num_tokens = len(packed)

    @classmethod
    def of(cls, token_ids: "TokenKey | Sequence[int]") -> "TokenKey":
        """The key of `token_ids`; a key is passed through."""
        return token_ids if isinstance(token_ids, TokenKey) else cls(token_ids)

    @classmethod
    def _packed(cls, data: bytes) -> "TokenKey":
        key = cls.__new__(cls)
        key.data = data
        key.num_tokens = len(data) // BYTES_PER_TOKEN
        return key

    def prefix(self, num_tokens: int) -> "TokenKey":
        """The key of the first `num_tokens` tokens (all of them if there are fewer)."""
        return TokenKey._packed(self.data[: max(num_tokens, 0) * BYTES_PER_TOKEN])

    def __len__(self) -> int:
        return self.num_tokens

    def __eq__(self, other: object) -> bool:
        return self.data == other.data if isinstance(other, TokenKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        return f"TokenKey({self.num_tokens} tokens)"


def unpack_token_ids(data: bytes) -> list[int]:
    """The token ids in `data`, a TokenKey's bytes or a slice of them."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
