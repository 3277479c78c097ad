"""Counted random numbers on the device: Philox-4x32-10 and the Gumbel noise made of its words (core/counted_random.py).

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

import triton
import triton.language as tl

MAX_GUMBEL = 16.6356  # just above the noise of the largest random word: no token's noise exceeds it


@triton.jit
def random_words(group, position, choice, key_low, key_high):  # type: ignore[no-untyped-def]
    """The four random words of tokens 4g to 4g + 3 for each g in `group`; all arguments and results are uint32.

    A round's products are taken in 64 bits, which compiles to one wide multiplication each.
    """
    c0 = group
    c1 = position
    c2 = choice
    c3 = tl.zeros_like(group)
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key_low
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key_high
        c3 = product0.to(tl.uint32)
        # The sums wrap: taken in 64 bits and cut, so that no build with overflow checks objects.
        key_low = (key_low.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        key_high = (key_high.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def gumbel(words):  # type: ignore[no-untyped-def]
    """Gumbel(0, 1) noise of random words, fp64, from the middle of one of 2**23 equal cells of (0, 1)."""
    uniform = ((words >> 9).to(tl.float64) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def gumbel_bound(words):  # type: ignore[no-untyped-def]
    """At least the noise of the words, in fp32 and cheap; close to it where the noise is large.

    -log(u) >= 1 - u, so -log(-log(u)) <= -log(1 - u), and 1 - u is exact in fp32.
    """
    complement = ((8388607 - (words >> 9).to(tl.int32)).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(complement)
