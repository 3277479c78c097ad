"""store_kv and paged_attention against the definitions: poisoned cache, scattered blocks, whole-cache comparison."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kernels import AttentionRule, reference
from baton.kernels.cpu import paged_attention, plan_attention, store_kv

NUM_LAYERS, HEAD_DIM = 3, 16
PLAIN = AttentionRule(HEAD_DIM**-0.5)


class Batch:
    """Random sequences (tokens before, tokens now) with their cache: NaN in every slot they have not written."""

    def __init__(self, sequences: list[tuple[int, int]], num_heads: int, num_kv_heads: int, block_size: int, seed: int):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        needed = [-(-(before + now) // block_size) for before, now in sequences]
        num_blocks = sum(needed) + 3
        ids = rng.sample(range(num_blocks), num_blocks)
        self.tables = [[ids.pop() for _ in range(count)] for count in needed]
        self.context_lens = [before + now for before, now in sequences]
        self.cu_seqlens = [0]
        self.slots: list[int] = []
        cache = torch.full((num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, HEAD_DIM), torch.nan)
        for table, (before, now) in zip(self.tables, sequences, strict=True):
            self.cu_seqlens.append(self.cu_seqlens[-1] + now)
            for t in range(before + now):
                block, offset = table[t // block_size], t % block_size
                if t < before:
                    cache[block, :, :, :, offset] = torch.randn(
                        (NUM_LAYERS, 2, num_kv_heads, HEAD_DIM), generator=generator
                    )
                else:
                    self.slots.append(block * block_size + offset)
        self.cache = cache
        total = self.cu_seqlens[-1]
        # As in the model: one buffer holds the queries, keys and values of a token side by side.
        heads = torch.randn((total, num_heads + 2 * num_kv_heads, HEAD_DIM), generator=generator)
        self.query = heads[:, :num_heads]
        self.key_value = heads[:, num_heads:].view(total, 2, num_kv_heads, HEAD_DIM)

    def check(self, rule: AttentionRule = PLAIN) -> None:
        layer = 1
        expected_cache = self.cache.clone()
        reference.store_kv(expected_cache[:, layer], self.key_value, self.slots)
        expected = reference.paged_attention(
            self.query,
            expected_cache[:, layer],
            self.cu_seqlens,
            self.context_lens,
            self.tables,
            **rule._asdict(),
        )
        kv_layer = self.cache[:, layer]
        plan = plan_attention(
            kv_layer,
            torch.tensor(self.slots),
            self.cu_seqlens,
            self.context_lens,
            [torch.tensor(t) for t in self.tables],
            {0, rule.window},
        )
        store_kv(kv_layer, self.key_value, plan)
        actual = paged_attention(self.query, self.key_value, kv_layer, plan, rule)
        assert actual.is_contiguous()
        torch.testing.assert_close(self.cache, expected_cache, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(actual, expected.flatten(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    "sequences",
    [
        pytest.param([(0, 1)], id="first token"),
        pytest.param([(36, 1)], id="one decode"),
        pytest.param([(0, 37)], id="whole prompt"),
        pytest.param([(16, 16)], id="chunk at a block border"),
        pytest.param([(5, 12), (0, 3), (70, 1), (15, 1), (16, 1), (0, 1), (1, 2)], id="mixed"),
    ],
)
def test_equals_the_definition(
    sequences: list[tuple[int, int]], num_heads: int, num_kv_heads: int, block_size: int
) -> None:
    Batch(sequences, num_heads, num_kv_heads, block_size, seed=block_size).check()


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5),
    heads=st.sampled_from([(2, 1), (2, 2), (9, 3)]),
    block_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    seed=st.integers(0, 1000),
    rule=st.builds(
        AttentionRule,
        scale=st.sampled_from([PLAIN.scale, 0.3]),
        window=st.sampled_from([0, 1, 2, 7, 16, 100]),
        soft_cap=st.sampled_from([0.0, 0.5, 30.0]),
    ),
)
def test_equals_the_definition_for_any_batch(
    sequences: list[tuple[int, int]], heads: tuple[int, int], block_size: int, seed: int, rule: AttentionRule
) -> None:
    Batch(sequences, *heads, block_size, seed).check(rule)


def test_a_query_that_likes_one_key_returns_its_value() -> None:
    """By hand: block 1 holds token 0, block 0 holds token 1; the query points along token 0's key."""
    cache = torch.full((2, 1, 2, 1, 1, 2), torch.nan)
    cache[1, 0, :, 0, 0] = torch.tensor([[100.0, 0.0], [7.0, 8.0]])
    key_value = torch.tensor([[[[0.0, 0.0]], [[1.0, 1.0]]]])
    query = torch.tensor([[[100.0, 0.0]]])
    layer = cache[:, 0]
    plan = plan_attention(layer, torch.tensor([0]), [0, 1], [2], [torch.tensor([1, 0])])
    store_kv(layer, key_value, plan)
    assert paged_attention(query, key_value, layer, plan, PLAIN).tolist() == [[7.0, 8.0]]
    assert cache[0, 0, :, 0, 0].tolist() == [[0.0, 0.0], [1.0, 1.0]]
