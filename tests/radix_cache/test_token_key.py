"""TokenKey and chain hashes, against literals and against an independent reading of their definition."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baton.radix_cache.chain_hash import HashRun, chain_hashes
from baton.radix_cache.token_key import TokenKey

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_the_bytes_are_little_endian_uint32() -> None:
    assert TokenKey([1, 258, 2**32 - 1]).data == b"\1\0\0\0\2\1\0\0\xff\xff\xff\xff"


@pytest.mark.parametrize("wrong", [[-1], [2**32], [1.5], ["a"], [None]])
def test_what_is_not_a_token_id_raises(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be"):
        TokenKey(wrong)


@given(TOKEN_IDS, TOKEN_IDS, st.integers(-1, 50))
def test_keys_compare_and_cut_like_lists(first: list[int], second: list[int], n: int) -> None:
    key = TokenKey(first)
    assert key.prefix(n) == TokenKey(first[: max(n, 0)])
    assert len(key.prefix(n)) == len(first[: max(n, 0)])
    assert TokenKey.of(key) is key
    assert (key == TokenKey(second)) == (first == second)
    assert hash(key) == hash(TokenKey(tuple(first)))


def test_known_chain_hashes() -> None:
    assert chain_hashes([1, 2, 3, 4], 2) == [11757796258266824799, 9672611912657428121]


@given(TOKEN_IDS, st.sampled_from([1, 2, 4]), st.integers(0, 2**64 - 1))
def test_chain_hashes_follow_their_definition(token_ids: list[int], block_size: int, parent: int) -> None:
    expected = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = token_ids[start : start + block_size]
        parent_bytes = struct.pack(">Q", expected[-1] if expected else parent)
        expected.append(xxhash.xxh3_64_intdigest(parent_bytes + struct.pack(f"<{block_size}I", *block)))
    assert chain_hashes(token_ids, block_size, parent) == expected
    assert chain_hashes(TokenKey(token_ids), block_size, parent) == expected


def test_a_chain_may_go_on_from_its_last_hash() -> None:
    token_ids = list(range(100, 112))
    whole = chain_hashes(token_ids, 4)
    assert chain_hashes(token_ids[4:], 4, whole[0]) == whole[1:]


def test_a_long_chain_of_unresolved_runs_resolves() -> None:
    runs: list[HashRun] = []
    for token_id in range(5000):
        runs.append(HashRun(TokenKey([token_id]).data, 1, runs[-1] if runs else None, 1))
    expected = chain_hashes(range(5000), 1)
    assert runs[-1].hashes(0, 1) == expected[-1:]
    assert [run.hash_before(1) for run in runs] == expected
    assert [run.hash_before(0) for run in runs] == [0, *expected[:-1]]
