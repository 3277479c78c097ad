"""Decode and prefill attention under Triton's interpreter, against the definition.

Everything that must not be read is poisoned: NaN in every slot beyond a context, a block id far outside of the pool in
every table entry beyond it, NaN in the keys and values beside the queries. bfloat16 is left to the compile tests and
to the device: the interpreter computes with its bits as if they were integers.
"""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels import reference
from baton.kernels.gpu import decode_attention as decode_module
from baton.kernels.gpu.decode_attention import DecodeWorkspace, decode_attention, decode_attention_cost
from baton.kernels.gpu.prefill_attention import prefill_attention, prefill_attention_cost

NO_BLOCK = 1 << 30
NUM_LAYERS, LAYER = 3, 1
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


@dataclass
class Batch:
    """Sequences as (tokens before, tokens now), with a cache that holds all of them."""

    sequences: list[tuple[int, int]]
    kv_layer: Tensor
    tables: Tensor
    query: Tensor  # a view of [tokens, H + 2 * KVH, D] whose other heads are NaN

    @property
    def context_lens(self) -> Tensor:
        return torch.tensor([before + now for before, now in self.sequences], dtype=torch.int32)

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *(now for _, now in self.sequences)], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def take(self, indices: list[int]) -> "Batch":
        """These sequences alone, in this order, over the same cache."""
        cu = self.cu_seqlens.tolist()
        rows = torch.cat([torch.arange(cu[i], cu[i + 1]) for i in indices])
        wide = torch.full((len(rows), self.query.shape[1] + 2, self.query.shape[2]), torch.nan, dtype=self.query.dtype)
        wide[:, : self.query.shape[1]] = self.query[rows]
        query = wide[:, : self.query.shape[1]]
        return Batch([self.sequences[i] for i in indices], self.kv_layer, self.tables[indices], query)

    def expected(self, window: int = 0, soft_cap: float = 0.0) -> Tensor:
        return reference.paged_attention(
            self.query.float(),
            self.kv_layer.float(),
            self.cu_seqlens.tolist(),
            self.context_lens.tolist(),
            self.tables.tolist(),
            window=window,
            soft_cap=soft_cap,
        )

    def decode(self, window: int = 0, soft_cap: float = 0.0, workspace: DecodeWorkspace | None = None) -> Tensor:
        num_heads, head_dim = self.query.shape[1:]
        workspace = workspace or DecodeWorkspace.allocate(
            len(self.sequences), int(self.context_lens.sum()), num_heads, head_dim, "cpu"
        )
        out = torch.full(self.query.shape, torch.nan, dtype=self.query.dtype)
        decode_attention(
            self.query, self.kv_layer, self.tables, self.context_lens, workspace,
            scale=head_dim**-0.5, window=window, soft_cap=soft_cap, out=out,
        )  # fmt: skip
        return out

    def prefill(self, window: int = 0, soft_cap: float = 0.0) -> Tensor:
        longest = max(now for _, now in self.sequences)
        return prefill_attention(
            self.query, self.kv_layer, self.tables, self.cu_seqlens, self.context_lens, longest,
            scale=self.query.shape[2] ** -0.5, window=window, soft_cap=soft_cap,
        )  # fmt: skip


def make_batch(
    sequences: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
) -> Batch:
    """Block ids in random order. With a window, tokens that no query sees are NaN and their blocks gone."""
    rng, generator = random.Random(7), torch.Generator().manual_seed(7)
    needed = [-(-(before + now) // block_size) for before, now in sequences]
    ids = rng.sample(range(sum(needed) + 3), sum(needed) + 3)
    pool = torch.full((len(ids), NUM_LAYERS, 2, num_kv_heads, block_size, head_dim), torch.nan)
    tables = torch.full((len(sequences), max(needed) + 2), NO_BLOCK, dtype=torch.int32)
    for s, (before, now) in enumerate(sequences):
        oldest = max(0, before - window + 1) if window else 0
        for i in range(oldest // block_size, needed[s]):
            tables[s, i] = ids.pop()
            begin, end = max(0, oldest - i * block_size), min(block_size, before + now - i * block_size)
            shape = (NUM_LAYERS, 2, num_kv_heads, end - begin, head_dim)
            pool[tables[s, i], ..., begin:end, :] = torch.randn(shape, generator=generator)
    tokens = sum(now for _, now in sequences)
    wide = torch.full((tokens, num_heads + 2 * num_kv_heads, head_dim), torch.nan)
    wide[:, :num_heads] = torch.randn((tokens, num_heads, head_dim), generator=generator)
    return Batch(sequences, pool.to(dtype)[:, LAYER], tables, wide.to(dtype)[:, :num_heads])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


DECODES = [(context - 1, 1) for context in (1, 16, 256, 257, 530, 33)]
CHUNKS = [(0, 1), (0, 70), (5, 12), (63, 65), (200, 3), (127, 1)]
# (query heads, KV heads, head_dim, block_size, dtype, window, soft cap)
CASES = [
    pytest.param(4, 1, 64, 16, torch.float32, 0, 0.0, id="GQA 4"),
    pytest.param(2, 2, 80, 32, torch.float32, 0, 0.0, id="MHA, 80"),
    pytest.param(3, 1, 48, 128, torch.float32, 0, 0.0, id="GQA 3, 48, block 128"),
    pytest.param(4, 2, 32, 1, torch.float16, 0, 0.0, id="block 1, half"),
    pytest.param(2, 1, 64, 8, torch.float32, 100, 0.0, id="window"),
    pytest.param(4, 2, 64, 64, torch.float16, 1, 0.0, id="window of the token itself, half"),
    pytest.param(2, 1, 64, 16, torch.float32, 0, 2.0, id="soft cap"),
    pytest.param(7, 1, 96, 4, torch.float16, 40, 3.0, id="GQA 7, 96, window, cap, half"),
]
MORE_CASES = [
    pytest.param(16, 1, 128, 16, torch.float16, 0, 0.0, id="GQA 16, half"),
    pytest.param(5, 1, 112, 2, torch.float32, 17, 0.0, id="GQA 5, 112"),
    pytest.param(2, 1, 160, 16, torch.float16, 0, 0.0, id="160, half"),
    pytest.param(2, 1, 256, 16, torch.float16, 64, 5.0, id="256, half"),
    pytest.param(48, 1, 64, 16, torch.float16, 0, 0.0, id="GQA 48: head tiles, half"),
    pytest.param(128, 1, 16, 16, torch.float16, 0, 0.0, id="MQA 128, half"),
]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "window", "soft_cap"), CASES)
def test_decode_equals_the_definition(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, window: int, soft_cap: float
) -> None:
    batch = make_batch(DECODES, num_heads, num_kv_heads, head_dim, block_size, dtype, window)
    assert_close(batch.decode(window, soft_cap), batch.expected(window, soft_cap))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "window", "soft_cap"), CASES)
def test_prefill_equals_the_definition(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, window: int, soft_cap: float
) -> None:
    sequences = CHUNKS if dtype == torch.float16 else [(0, 17), (5, 12), (70, 3), (47, 1)]  # its tiles are small
    batch = make_batch(sequences, num_heads, num_kv_heads, head_dim, block_size, dtype, window)
    assert_close(batch.prefill(window, soft_cap), batch.expected(window, soft_cap))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "window", "soft_cap"), MORE_CASES
)
def test_both_equal_the_definition_in_odd_shapes(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, window: int, soft_cap: float
) -> None:
    batch = make_batch([(300, 1), (0, 1)], num_heads, num_kv_heads, head_dim, block_size, dtype, window)
    assert_close(batch.decode(window, soft_cap), batch.expected(window, soft_cap))
    batch = make_batch([(30, 5), (0, 40)], num_heads, num_kv_heads, head_dim, block_size, dtype, window)
    assert_close(batch.prefill(window, soft_cap), batch.expected(window, soft_cap))


def test_both_equal_the_definition_at_the_head_size_of_the_models() -> None:
    """Llama's and Qwen3's: 128, 4 query heads a KV head, blocks of 16; a second piece, a cached prefix, whole tiles."""
    batch = make_batch([(299, 1), (0, 1)], 4, 1, 128, 16, torch.float16)
    assert_close(batch.decode(), batch.expected())
    batch = make_batch([(37, 3), (0, 33), (270, 1)], 4, 1, 128, 16, torch.float16)
    assert_close(batch.prefill(), batch.expected())


@pytest.mark.slow
def test_a_decode_over_131072_tokens_equals_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 pieces. A tile is a whole piece, since the interpreter takes a minute over the 8192 tiles of 16 tokens.

    The outputs are means of so many values that one token's value moves them by 2e-6 to 1e-5: ten times the tolerance.
    """
    choose = decode_module.decode_config

    def with_long_tiles(*arguments: Any) -> decode_module.DecodeConfig:
        config = choose(*arguments)
        return dataclasses.replace(config, constants=config.constants | {"KEY_TILE": config.constants["PIECE"]})

    monkeypatch.setattr(decode_module, "decode_config", with_long_tiles)
    batch = make_batch([(131071, 1)], 1, 1, 16, 128)
    torch.testing.assert_close(batch.decode(), batch.expected(), rtol=0, atol=2e-7)


@settings(max_examples=8, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 1), (2, 2), (6, 2)]),
    block_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    window=st.sampled_from([0, 1, 2, 31, 64]),
)
def test_both_equal_the_definition_for_any_batch(
    sequences: list[tuple[int, int]], heads: tuple[int, int], block_size: int, window: int
) -> None:
    batch = make_batch(sequences, *heads, 16, block_size, torch.float16, window)
    assert_close(batch.prefill(window), batch.expected(window))
    batch = make_batch([(before, 1) for before, _ in sequences], *heads, 16, block_size, torch.float16, window)
    assert_close(batch.decode(window), batch.expected(window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_decode_gets_the_same_bits_in_any_company(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    batch = make_batch([(529, 1), (10, 1), (300, 1), (255, 1)], 3, 1, 32, 16, dtype)
    together = batch.decode()
    for i in range(4):
        assert torch.equal(batch.take([i]).decode()[0], together[i])
    monkeypatch.setattr(decode_module, "num_multiprocessors", lambda device: 13)  # another grid
    assert torch.equal(batch.take([2, 0, 3, 1]).decode(), together[[2, 0, 3, 1]])


@pytest.mark.parametrize(
    ("dtype", "window", "chunks"),
    [
        (torch.float16, 0, (64, 1, 5, 30, 49, 1)),
        (torch.float16, 40, (64, 1, 5, 30, 49, 1)),
        (torch.float32, 0, (16, 1, 5, 14)),
    ],
)
def test_a_prompt_gets_the_same_bits_in_any_chunks_and_company(
    dtype: torch.dtype, window: int, chunks: tuple[int, ...]
) -> None:
    length = sum(chunks)
    batch = make_batch([(0, length), (0, 20)], 3, 1, 32, 16, dtype)
    whole = batch.prefill(window)[:length]
    position = 0
    for now in chunks:
        rows = slice(position, position + now)
        chunk = Batch([(position, now)], batch.kv_layer, batch.tables[:1], batch.query[rows])
        assert torch.equal(chunk.prefill(window), whole[rows])
        mates = Batch(
            [(0, 20), (position, now)],
            batch.kv_layer,
            batch.tables[[1, 0]],
            torch.cat((batch.query[length:], batch.query[rows])),
        )
        assert torch.equal(mates.prefill(window)[20:], whole[rows])
        position += now


def test_padding_rows_are_zeros_and_nothing_else_is_written() -> None:
    batch = make_batch([(300, 1), (5, 1)], 4, 2, 16, 16)
    query = torch.full((4, 4, 16), torch.nan)
    query[1], query[3] = batch.query
    tables = torch.full((4, batch.tables.shape[1]), NO_BLOCK, dtype=torch.int32)
    tables[1], tables[3] = batch.tables
    contexts = torch.tensor([0, 301, 0, 6], dtype=torch.int32)
    workspace = DecodeWorkspace(torch.full((9, 4, 16), torch.nan), torch.full((9, 4), torch.nan))
    out = torch.full((6, 4, 16), torch.nan)
    decode_attention(query, batch.kv_layer, tables, contexts, workspace, scale=0.25, out=out[:4])
    assert_close(out[[1, 3]], batch.expected())
    assert out[[0, 2]].eq(0).all()
    assert out[4:].isnan().all()
    assert workspace.partial_out[2:].isnan().all()  # the short one is the third piece, and needs no room
    assert workspace.partial_lse[2:].isnan().all()


def test_rows_beyond_the_last_chunk_are_not_written() -> None:
    batch = make_batch([(3, 5)], 4, 2, 16, 16)
    query = torch.cat((batch.query, torch.full((3, 4, 16), torch.nan)))
    out = torch.full((8, 4, 16), torch.nan)
    prefill_attention(query, batch.kv_layer, batch.tables, batch.cu_seqlens, batch.context_lens, 5, scale=0.25, out=out)
    assert_close(out[:5], batch.expected())
    assert out[5:].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_pieces_without_room_give_nan_and_spare_the_others() -> None:
    batch = make_batch([(599, 1), (599, 1), (20, 1)], 2, 1, 16, 16)
    workspace = DecodeWorkspace(torch.zeros((5, 2, 16)), torch.zeros((5, 2)))
    assert not workspace.fits([600, 600, 21])
    out = batch.decode(workspace=workspace)
    assert out[1].isnan().all()
    assert_close(out[[0, 2]], batch.expected()[[0, 2]])


def test_the_room_of_a_workspace() -> None:
    workspace = DecodeWorkspace.allocate(3, 1000, 2, 16, "cpu")
    assert workspace.partial_out.shape == (6, 2, 16)  # 1000 tokens are 3 full pieces; each sequence may end in one
    assert workspace.fits([256, 488, 256])
    assert workspace.fits([257, 257, 257])
    assert not workspace.fits([257, 257, 257, 1])
    assert DecodeWorkspace.num_bytes(3, 1000, 2, 16) == 6 * 2 * 17 * 4


@pytest.mark.parametrize("which", ["decode", "prefill"])
def test_offsets_beyond_31_bits(which: str) -> None:
    """A pool of more than 2^31 elements (hardly touched, so it takes no memory) with the request in its last blocks,
    and queries whose rows are 2^30 elements apart."""
    small = make_batch([(20, 1), (20, 1), (20, 1)] if which == "decode" else [(20, 3)], 2, 1, 16, 16, torch.float16)
    first, stride = 64, 1 << 25
    num_blocks, block = small.kv_layer.shape[0], small.kv_layer.shape[1:]
    huge = torch.empty((first + num_blocks - 1) * stride + block.numel(), dtype=torch.float16)
    kv_layer = huge.as_strided((first + num_blocks, *block), (stride, *small.kv_layer.stride()[1:]))
    kv_layer[first:] = small.kv_layer
    rows = torch.empty(2 * (1 << 30) + 32, dtype=torch.float16)
    query = rows.as_strided(small.query.shape, (1 << 30, 16, 1))
    query.copy_(small.query)
    tables = torch.where(small.tables == NO_BLOCK, NO_BLOCK, small.tables + first)
    batch = Batch(small.sequences, kv_layer, tables, query)
    actual = batch.decode() if which == "decode" else batch.prefill()
    assert torch.equal(actual, small.decode() if which == "decode" else small.prefill())


def test_wrong_arguments_are_named() -> None:
    batch = make_batch([(20, 1)], 4, 2, 16, 16)
    workspace = DecodeWorkspace.allocate(1, 21, 4, 16, "cpu")
    good = {
        "query": batch.query,
        "kv_layer": batch.kv_layer,
        "block_tables": batch.tables,
        "context_lens": batch.context_lens,
        "workspace": workspace,
        "scale": 0.25,
    }
    wrong = [
        ("query", batch.query.to(torch.float64)),
        ("query", batch.query[:, :3]),
        ("query", batch.query.transpose(0, 1)),
        ("kv_layer", batch.kv_layer.half()),
        ("kv_layer", batch.kv_layer.transpose(2, 3)),
        ("kv_layer", batch.kv_layer[:, :, :, :12]),
        ("block_tables", batch.tables.long()),
        ("context_lens", batch.context_lens[:0]),
        ("workspace", DecodeWorkspace.allocate(1, 21, 2, 16, "cpu")),
        ("scale", 0.0),
        ("window", -1),
        ("out", torch.empty((2, 4, 16))),
    ]
    for name, value in wrong:
        with pytest.raises(ValueError, match=r"query|kv_layer|block_tables|context_lens|workspace|scale|window|out"):
            decode_attention(**{**good, name: value})
    with pytest.raises(ValueError, match="cu_seqlens"):
        prefill_attention(
            batch.query, batch.kv_layer, batch.tables, batch.cu_seqlens[:1], batch.context_lens, 1, scale=0.25
        )


def test_costs_by_hand() -> None:
    """One decode over 10 tokens: 10 keys and values of 2 heads, one query and output of 4; 4 D operations a score."""
    cost = decode_attention_cost([10], (4, 2, 8), 2)
    assert (cost.bytes, cost.flops) == ((2 * 10 * 2 + 2 * 4) * 8 * 2, 10 * 4 * 4 * 8)
    cost = prefill_attention_cost([(2, 3)], (4, 2, 8), 2)
    assert (cost.bytes, cost.flops) == ((2 * 5 * 2 + 2 * 3 * 4) * 8 * 2, (3 + 4 + 5) * 4 * 4 * 8)
