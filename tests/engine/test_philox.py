"""The vectorised random numbers equal core/counted_random.py, which is checked against published vectors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.core import counted_random
from baton.engine.philox import MAX_GUMBEL, gumbel, random_words, seed_words

# (seed, choice, position, token id) |-> random word. Fixed for ever: a resumed stream depends on them.
KNOWN_WORDS = {
    (0, 0, 0, 0): 0x6627E8D5,
    (0, 0, 0, 1): 0xE169C58D,
    (0, 0, 0, 2): 0xBC57AC4C,
    (0, 0, 0, 3): 0x9B00DBD8,
    (42, 1, 0, 3): 0xB62C409C,
    (2**64 - 1, 2, 8191, 5): 0x788F1208,
    (1234567890123456789, 0, 17, 49151): 0x89DE81F3,
}


def words_of(seed: int, choice: int, position: int, groups: list[int]) -> torch.Tensor:
    count = len(groups)
    keys = torch.tensor([seed_words(seed)] * count).t()
    return random_words(keys, torch.full((count,), choice), torch.full((count,), position), torch.tensor(groups))


@pytest.mark.parametrize("at", KNOWN_WORDS)
def test_known_words(at: tuple[int, int, int, int]) -> None:
    seed, choice, position, token = at
    assert int(words_of(seed, choice, position, [token // 4])[0, token % 4]) == KNOWN_WORDS[at]


@given(
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**32 - 1),
    groups=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4),
)
def test_words_and_noise_equal_the_definition(seed: int, choice: int, position: int, groups: list[int]) -> None:
    words = words_of(seed, choice, position, groups)
    noise = gumbel(words)
    for row, group in enumerate(groups):
        for lane in range(4):
            token = 4 * group + lane
            assert int(words[row, lane]) == counted_random.random_word(seed, choice, position, token)
            assert float(noise[row, lane]) == pytest.approx(
                counted_random.gumbel(seed, choice, position, token), rel=1e-12, abs=1e-12
            )


def test_rows_with_different_keys_and_counters_do_not_mix() -> None:
    keys = torch.tensor([seed_words(5), seed_words(2**63 + 9)]).t()
    words = random_words(keys, torch.tensor([0, 3]), torch.tensor([7, 8]), torch.tensor([11, 12]))
    for row, (seed, choice, position, group) in enumerate([(5, 0, 7, 11), (2**63 + 9, 3, 8, 12)]):
        expected = [counted_random.random_word(seed, choice, position, 4 * group + lane) for lane in range(4)]
        assert words[row].tolist() == expected


def test_noise_is_bounded_by_its_extreme_words() -> None:
    extremes = gumbel(torch.tensor([0, 2**32 - 1]))
    assert extremes.isfinite().all()
    assert float(extremes.max()) < MAX_GUMBEL < float(extremes.max()) + 1e-3
