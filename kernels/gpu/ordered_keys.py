"""Floats as integers that compare the same way, and a search over them that asks for 16 at a time."""

import triton
import triton.language as tl

MINUS_INF_KEY = tl.constexpr(-2139095041)  # ordered_key(-inf)
NO_KEY = tl.constexpr(-2147483648)  # below that of every float


@triton.jit
def ordered_key(x):  # type: ignore[no-untyped-def]
    """An int32 for each fp32 that is no NaN: keys compare as the floats do, and those of equal floats are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # both zeros get one key
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of_key(key):  # type: ignore[no-untyped-def]
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def fp32_not_below(x):  # type: ignore[no-untyped-def]
    """The least fp32 that is >= the fp64 `x`: an fp32 logit is >= one exactly if it is >= the other."""
    nearest = x.to(tl.float32)
    above = float_of_key(ordered_key(nearest) + 1)
    return tl.where(nearest.to(tl.float64) < x, above, nearest)


@triton.jit
def fp32_below(x):  # type: ignore[no-untyped-def]
    """Some fp32 just below the fp64 `x`, which is finite. Two keys down: one down from zero is the other zero."""
    return float_of_key(ordered_key(x.to(tl.float32)) - 2)


@triton.jit
def asked_keys(low, high):  # type: ignore[no-untyped-def]
    """16 keys in (low, high], rising; the last is high."""
    step = (high - low + 15) // 16
    return tl.minimum(low + (tl.arange(0, 16) + 1) * step, high)


@triton.jit
def narrowed(low, high, passing):  # type: ignore[no-untyped-def]
    """The range that is left when the first `passing` of the 16 keys asked for are not above the wanted one."""
    step = (high - low + 15) // 16
    above = tl.minimum(low + (passing + 1) * step, high) - 1
    return tl.minimum(low + passing * step, high), tl.where(passing == 16, high, above)
