"""The counted random numbers of core/counted_random.py, many at once; the tests keep the two equal."""

import torch
from torch import Tensor

from ..core.counted_random import ROUNDS

# Philox-4x32's multipliers and key increments (Salmon et al., SC'11, table 2), in the order used below.
_MULTIPLIERS = torch.tensor([[0xCD9E8D57], [0xD2511F53]])
_KEY_INCREMENTS = torch.tensor([[0x9E3779B9], [0xBB67AE85]])
_MASK = 0xFFFFFFFF
MAX_GUMBEL = 16.6356  # just above the noise of the largest random word: no token's noise exceeds it


def seed_words(seed: int) -> tuple[int, int]:
    """The Philox key of a 64-bit seed, low word first."""
    return seed & _MASK, seed >> 32 & _MASK


def random_words(keys: Tensor, choices: Tensor, positions: Tensor, groups: Tensor) -> Tensor:
    """The 32-bit random words of the tokens 4g to 4g + 3, for each g in `groups` `[n]`; returns `[n, 4]`.

    `keys` is `[2, n]`, all else `[n]`, int64. The counter is (group, position, choice, 0). The two multiplications of
    a round run as one. int64 products wrap modulo 2**64, so their low word and, shifted and masked, their high word
    are exact.
    """
    key = keys.clone()
    even = torch.stack((groups, choices))  # words 0 and 2 of the counter
    odd = torch.stack((positions, torch.zeros_like(groups)))  # words 1 and 3
    for _ in range(ROUNDS):
        product = even.flip(0).mul_(_MULTIPLIERS)
        # The key is left to grow beyond 32 bits, since the mask cuts it with the sign bits of the shift.
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(_MASK)
        odd = product.bitwise_and_(_MASK)
        key += _KEY_INCREMENTS
    return torch.stack((even[0], odd[0], even[1], odd[1]), 1)


def gumbel(words: Tensor) -> Tensor:
    """Gumbel(0, 1) noise of random words, float64; see `core.counted_random`."""
    uniform = (words >> 9).double().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()
