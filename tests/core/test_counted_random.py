"""Counted randomness: the published test vectors of Philox-4x32-10, and our own numbers, which must not move."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.counted_random import gumbel, philox4x32, random_word, uniform

# The known answers of the Random123 distribution for philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter: tuple, key: tuple, expected: tuple) -> None:
    assert philox4x32(counter, key) == expected


@pytest.mark.parametrize(
    ("seed", "choice", "position", "token_id", "word"),
    [
        (0, 0, 0, 0, 0x6627E8D5),
        (0, 0, 0, 3, 0x9B00DBD8),
        (1, 0, 0, 0, 0xE3E80670),
        (2**64 - 1, 1, 4095, 49151, 0xBDA68A5A),
        (12345678901234567890, 0, 17, 42, 0x4327005C),
    ],
)
def test_the_words_of_tokens_never_change(seed: int, choice: int, position: int, token_id: int, word: int) -> None:
    """A stream resumed on another version must go on with the same tokens: these numbers are part of the protocol."""
    assert random_word(seed, choice, position, token_id) == word


@given(st.integers(0, 2**32 - 1))
def test_uniform_is_inside_the_open_interval_and_exact_in_float32(word: int) -> None:
    value = uniform(word)
    assert 0.0 < value < 1.0
    assert value * 2**24 == int(value * 2**24)


def test_the_noise_has_the_mean_of_gumbel() -> None:
    noise = [gumbel(7, 0, position, 11) for position in range(4000)]
    assert all(map(math.isfinite, noise))
    assert sum(noise) / len(noise) == pytest.approx(0.5772, abs=0.08)  # Euler's constant; sd of the mean is 0.02
