"""The counted random numbers of core/counted_random.py, many at once; the tests keep the two equal."""

import torch
from torch import Tensor

from ..core.counted_random import ROUNDS

# Philox-4x32's multipliers and key increments (Salmon et al., SC'11, table 2).
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
MAX_GUMBEL = 16.6355324  # just above the noise of the largest random word: no token's noise exceeds it


def random_words(seed: int, choice: int, position: int, groups: Tensor) -> Tensor:
    """The 32-bit random words of the tokens 4g to 4g + 3, for each g in `groups` `[n]` int64; `[n, 4]` int64.

    int64 products wrap modulo 2**64, so their low word and, shifted and masked, their high word are exact.
    """
    # Words that are equal for all groups stay Python ints, which saves the first rounds most of their work.
    words: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int] = (groups, position, choice, 0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(ROUNDS):
        c0, c1, c2, c3 = words
        product0, product1 = c0 * _M0, c2 * _M1
        high0, high1 = (product0 >> 32) & _MASK, (product1 >> 32) & _MASK
        words = (high1 ^ c1 ^ k0, product1 & _MASK, high0 ^ c3 ^ k1, product0 & _MASK)
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack([torch.as_tensor(word) for word in words], 1)


def uniform(words: Tensor) -> Tensor:
    """Floats in (0, 1), float64: see `core.counted_random.uniform`."""
    return (words >> 9).double().add_(0.5).mul_(2.0**-23)


def gumbel_noise(seed: int, choice: int, position: int, token_ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise of `token_ids` `[n]`, float64; see `core.counted_random.gumbel`."""
    groups, lanes = token_ids >> 2, token_ids & 3
    unique, inverse = torch.unique_consecutive(groups, return_inverse=True)
    words = random_words(seed, choice, position, unique)[inverse, lanes]
    return uniform(words).log_().neg_().log_().neg_()
