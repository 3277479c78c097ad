"""Counted random numbers: Philox-4x32-10, a pure function of (key, counter).

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11. The same numbers come out on a CPU, in
Triton, in any batch and on any worker, so a stream resumed elsewhere goes on with the same tokens.

How sampling uses it: the key is the request's 64-bit seed, low word first; the counter is
(token_id // 4, position, choice, 0); word `token_id % 4` of the result is the token's random word; `uniform` turns it
into a float in (0, 1) and `gumbel` into noise. `position` is the index of the sampled token in prompt + output.
"""

import math

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a 128-bit `counter` and a 64-bit `key`, each given as 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def random_word(seed: int, choice: int, position: int, token_id: int) -> int:
    """The 32-bit random word of one token at one position of one choice of one request."""
    words = philox4x32((token_id // 4, position, choice, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return words[token_id % 4]


def uniform(word: int) -> float:
    """A float in (0, 1), exactly representable in fp32: the middle of one of 2**23 equal cells.

    23 bits and a half keep 1 - u as exact as u, so neither logarithm of the Gumbel noise can be infinite.
    """
    return ((word >> 9) + 0.5) * 2.0**-23


def gumbel(seed: int, choice: int, position: int, token_id: int) -> float:
    """Gumbel(0, 1) noise; argmax of (logit / temperature + noise) is a sample of the softmax."""
    return -math.log(-math.log(uniform(random_word(seed, choice, position, token_id))))
