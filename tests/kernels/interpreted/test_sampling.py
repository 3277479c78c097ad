"""Sampling kernels under the interpreter: the tokens of the CPU sampler, to the last one."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from baton.core import counted_random
from baton.core.request import SamplingParams
from baton.engine.sampler import HostSampler, SamplingRow
from baton.kernels import reference
from baton.kernels.gpu import ordered_keys, philox, sampling
from baton.kernels.gpu.sampling import SamplingTensors

INF = math.inf


def row(choice: int = 0, position: int = 0, **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), choice, position)


def tensors(rows: list[SamplingRow]) -> SamplingTensors:
    def floats(name: str) -> torch.Tensor:
        return torch.tensor([getattr(r.params, name) for r in rows], dtype=torch.float64)

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    seeds = [r.params.seed for r in rows]
    return SamplingTensors(
        temperature=floats("temperature"),
        top_k=integers([r.params.top_k for r in rows]),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        seed_low=integers([seed & 0xFFFFFFFF for seed in seeds]),
        seed_high=integers([seed >> 32 for seed in seeds]),
        choice=integers([r.choice for r in rows]),
        position=integers([r.position for r in rows]),
    )


def on_device(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    return sampling.sample(logits, tensors(rows)).tolist()


def on_host(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    tokens = HostSampler(torch.zeros(1, dtype=torch.int64)).sample(logits, rows)
    return [-1 if token is None else token for token in tokens]


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * scale


def random_rows(count: int, seed: int) -> list[SamplingRow]:
    rng = random.Random(seed)
    return [
        row(
            choice=rng.randrange(4),
            position=rng.randrange(9000),
            temperature=rng.choice([0.05, 0.6, 1.0, 3.0]),
            top_k=rng.choice([0, 0, -1, 2, 5, 30, 10**6]),
            top_p=rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-8]),
            min_p=rng.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
            seed=rng.randrange(2**64),
        )
        for _ in range(count)
    ]


MIXED = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.95},
    {"top_k": 5},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"min_p": 0.05},
    {"temperature": 2.0},
]


@triton.jit
def _words_and_noise(group_ptr, words_ptr, noise_ptr, bound_ptr, position, choice, key_low, key_high):
    group = tl.load(group_ptr + tl.arange(0, 16)).to(tl.uint32)
    zero = tl.zeros([1], tl.uint32)
    words = philox.random_words(
        group,
        zero + position.to(tl.uint32),
        zero + choice.to(tl.uint32),
        zero + key_low.to(tl.uint32),
        zero + key_high.to(tl.uint32),
    )
    for i in tl.static_range(4):
        at = tl.arange(0, 16) * 4 + i
        tl.store(words_ptr + at, words[i].to(tl.int64))
        tl.store(noise_ptr + at, philox.gumbel(words[i]))
        tl.store(bound_ptr + at, philox.gumbel_bound(words[i]))


def test_counted_random_numbers() -> None:
    seed, choice, position = 0xFEDCBA9876543210, 3, 2**31 + 5
    groups = torch.cat((torch.arange(8), torch.tensor([25, 1000, 32063, 37983, 65535, 65536, 2**29, 2**30])))
    words = torch.zeros(64, dtype=torch.int64)
    noise, bound = torch.zeros(64, dtype=torch.float64), torch.zeros(64)
    _words_and_noise[(1,)](groups, words, noise, bound, position, choice, seed & 0xFFFFFFFF, seed >> 32)
    tokens = [int(group) * 4 + i for group in groups for i in range(4)]
    assert words.tolist() == [counted_random.random_word(seed, choice, position, token) for token in tokens]
    expected = [counted_random.gumbel(seed, choice, position, token) for token in tokens]
    torch.testing.assert_close(noise, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-14)
    assert (bound.double() >= noise - 1e-5).all()


@triton.jit
def _keys(x_ptr, key_ptr, back_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    key = ordered_keys.ordered_key(tl.load(x_ptr + at))
    tl.store(key_ptr + at, key)
    tl.store(back_ptr + at, ordered_keys.float_of_key(key))


def test_keys_are_ordered_as_floats_are() -> None:
    rising = torch.tensor([-INF, -3e38, -2.5, -1e-45, -0.0, 0.0, 1e-45, 1e-38, 1.0, math.nextafter(1.0, 2), 2.5, INF])
    x = torch.cat((rising, rising[-1:].expand(4)))
    keys, back = torch.zeros(16, dtype=torch.int32), torch.zeros(16)
    _keys[(1,)](x, keys, back, 16)
    assert torch.equal(back, x)
    for (a, key_a), (b, key_b) in itertools.pairwise(zip(x.tolist(), keys.tolist(), strict=True)):
        assert (a < b) == (key_a < key_b)
        assert (a == b) == (key_a == key_b)


@pytest.mark.parametrize("vocab_size", [101, pytest.param(8193, marks=pytest.mark.slow)])
def test_a_mixed_batch(vocab_size: int) -> None:
    logits = random_logits(len(MIXED), vocab_size)
    before = logits.clone()
    rows = [row(seed=2**63 + i * 77777777777, choice=i % 3, position=10 * i, **p) for i, p in enumerate(MIXED)]
    assert on_device(logits, rows) == on_host(logits, rows)
    assert torch.equal(logits, before)


def test_few_distinct_logits_and_any_rule() -> None:
    """Ties at every threshold."""
    rows = random_rows(12, seed=5)
    logits = torch.randint(-3, 4, (12, 37), generator=torch.Generator().manual_seed(2)).float()
    assert on_device(logits, rows) == on_host(logits, rows)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [1, 7, 300, 4096])
def test_any_rule(vocab_size: int) -> None:
    rows = random_rows(6, seed=vocab_size)
    for distinct in (True, False):
        logits = random_logits(6, vocab_size, seed=vocab_size)
        logits = logits if distinct else logits.round()
        assert on_device(logits, rows) == on_host(logits, rows)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [128256, 262144])
def test_vocabularies_of_models(vocab_size: int) -> None:
    rules = ({"temperature": 1.3, "top_k": 40, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.95})
    rows = [row(seed=i, position=100 + i, **p) for i, p in enumerate(rules)]
    logits = random_logits(len(rows), vocab_size)
    assert on_device(logits, rows) == on_host(logits, rows)


@pytest.mark.parametrize(
    ("vocab_size", "rule"),
    [
        (8193, {"top_k": 5}),
        (8193, {"top_p": 0.9}),
        (8193, {"top_k": 200, "top_p": 0.95}),  # more than there are groups
        pytest.param(49152, {"top_k": 5}, marks=pytest.mark.slow),
        pytest.param(49152, {"top_p": 0.9}, marks=pytest.mark.slow),
    ],
)
def test_the_kept_set_with_most_of_the_mass_on_one_token(vocab_size: int, rule: dict[str, Any]) -> None:
    """Regression SP03; the token of 40 % or more of the mass, and a flat row."""
    logits = random_logits(2, vocab_size, scale=1.0)
    logits[0, 77] = 10.0
    rows = [row(**rule)] * len(logits)
    lowest = lowest_kept(logits, rows)
    for values, bound in zip(logits, lowest.tolist(), strict=True):
        kept = set(torch.nonzero(values >= bound).flatten().tolist())
        assert kept == reference.kept_tokens(values.tolist(), reference.SamplingRule(**rule))


def lowest_kept(logits: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    params, cut = tensors(rows), sampling.VocabularyCut(logits.shape[1])
    group_best, piece_best, _, piece_mass = sampling._launch_scan(logits, params, cut, has_filters=True)
    return sampling.launch_filters(logits, params, group_best, piece_best, piece_mass)


def test_ties_at_the_kth_logit_alone_and_in_a_batch() -> None:
    """Regression SP01: all tokens that equal the k-th stay, in every batch."""
    logits = torch.zeros(8, 40)
    logits[:, 10] = 1.0
    logits[:, 20:] = -1.0
    rows = [row(seed=i, top_k=1 + i % 5, position=i) for i in range(8)]
    together = on_device(logits, rows)
    assert together == on_host(logits, rows)
    assert [on_device(logits[:1], [rows[i]])[0] for i in (1, 4)] == [together[1], together[4]]
    assert together[0] == together[5] == 10
    assert torch.equal(lowest_kept(logits[:2], rows[1:3]), torch.zeros(2))


def test_tiny_temperatures_are_greedy() -> None:
    """Regression SP04. Gaps of 0.1 at 1e-3 are 100 units of z: far more than the noise can bridge."""
    cases = list(itertools.product([1e-3, 1e-6, 1e-7, 1e-8, 1e-12, 5e-324], [1.0, 1e-8]))
    logits = (torch.randperm(100 * len(cases), generator=torch.Generator().manual_seed(1)) * 0.1).view(-1, 100)
    rows = [row(temperature=t, top_p=p, seed=i) for i, (t, p) in enumerate(cases)]
    assert on_device(logits, rows) == logits.argmax(-1).tolist()
    assert on_device(torch.ones(1, 50), [row(temperature=1e-12, seed=3)]) == [0]


def test_top_k_that_is_off_or_beyond_the_vocabulary() -> None:
    """Regression SP07: 0, -1, V and V + 1 draw as without it, 1 is greedy, and so is top_p 0; mixed in one batch."""
    logits = random_logits(1, 50, scale=0.5).expand(6, -1).contiguous()
    rows = [row(seed=9, top_k=top_k) for top_k in (0, -1, 50, 51)]
    plain, greedy = on_host(logits[:1], [row(seed=9)])[0], int(logits[0].argmax())
    assert plain != greedy
    assert on_device(logits, [*rows, row(seed=9, top_k=1), row(seed=9, top_p=0.0)]) == [plain] * 4 + [greedy] * 2


def test_rows_without_a_finite_best_harm_no_other() -> None:
    good = random_logits(1, 70)[0]
    bad = [good.clone().fill_(x) for x in (math.nan, INF, -INF)]
    one_nan, one_inf, some_suppressed = good.clone(), good.clone(), good.clone()
    one_nan[69], one_inf[3], some_suppressed[good.topk(3).indices] = math.nan, INF, -INF
    logits = torch.stack([good, *bad, one_nan, one_inf, some_suppressed, good])
    for rule in ({"temperature": 0.0}, {}, {"top_p": 0.9}):
        rows = [row(seed=5, **rule)] * len(logits)
        tokens = on_device(logits, rows)
        assert tokens == on_host(logits, rows)
        assert tokens[1:6] == [-1] * 5
        assert tokens[0] == tokens[7]
        assert tokens[0] >= 0


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    logits = random_logits(len(MIXED), 203)
    rows = [row(seed=i, position=i, **p) for i, p in enumerate(MIXED)]
    together = on_device(logits, rows)
    order = [4, 2, 0, 6]
    assert on_device(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    for i in (0, 4):
        assert on_device(logits[i : i + 1], [rows[i]]) == [together[i]]


def test_sums_of_masses_are_the_same_bits_in_any_batch() -> None:
    logits = random_logits(3, 9000)
    rows = [row(top_p=0.9)] * 3
    cut = sampling.VocabularyCut(9000)
    whole = sampling._launch_scan(logits, tensors(rows), cut, has_filters=True)
    alone = sampling._launch_scan(logits[2:], tensors(rows[:1]), cut, has_filters=True)
    for a, b in zip(whole, alone, strict=True):
        assert torch.equal(a[2:], b)


def test_nothing_beyond_a_row_is_read_and_rows_may_lie_apart() -> None:
    buffer = torch.full((3, 300), math.nan)
    logits = buffer[:, 5:106]
    logits.copy_(random_logits(3, 101))
    rows = [row(temperature=0.0), row(seed=1), row(seed=2, top_k=7, top_p=0.9)]
    assert on_device(logits, rows) == on_host(logits.contiguous(), rows)


def test_feedback_slots_and_a_given_output() -> None:
    logits = random_logits(4, 90)
    logits[2] = math.nan
    rows = [row(temperature=0.0), row(seed=1), row(seed=2), row(seed=3)]
    feedback = torch.full((9,), -7, dtype=torch.int64)
    out = torch.full((4,), -9, dtype=torch.int64)
    slots = torch.tensor([8, 0, 3, -1], dtype=torch.int32)
    result = sampling.sample(logits, tensors(rows), feedback, slots, out=out)
    expected = on_host(logits, rows)
    assert result is out
    assert out.tolist() == expected
    assert feedback.tolist() == [expected[1], -7, -7, -1, -7, -7, -7, -7, expected[0]]


def test_what_the_host_knows_changes_no_token() -> None:
    logits = random_logits(2, 90)
    greedy = [row(temperature=0.0)] * 2
    plain = [row(seed=4), row(temperature=0.0)]
    few = replace(tensors(greedy), any_drawn=False, any_filtered=False)
    assert sampling.sample(logits, few).tolist() == on_host(logits, greedy)
    assert sampling.sample(logits, replace(tensors(plain), any_filtered=False)).tolist() == on_host(logits, plain)


def test_argmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0] * 4, [-0.0, 0.0, -1.0, -INF], [1.0, math.nan, 2.0, 0.0]])
    assert sampling.argmax(logits).tolist() == [1, 0, 0, -1]
    wide = random_logits(2, 9000)
    wide[0, [4095, 4096, 8999]] = 50.0
    assert sampling.argmax(wide).tolist() == [4095, int(wide[1].argmax())]
    assert sampling.argmax(torch.full((1, 5), -INF)).tolist() == [-1]


def test_wrong_arguments_are_named() -> None:
    logits, params = random_logits(2, 10), tensors([row(), row()])
    with pytest.raises(ValueError, match="temperature has shape"):
        sampling.sample(logits[:1], params)
    with pytest.raises(ValueError, match="logits is torch"):
        sampling.sample(logits.half(), params)
    with pytest.raises(ValueError, match="not contiguous"):
        sampling.sample(logits.t().contiguous().t(), params)
    with pytest.raises(ValueError, match="go together"):
        sampling.sample(logits, params, torch.zeros(1, dtype=torch.int64))
    assert sampling.sample(torch.zeros(0, 10), tensors([])).tolist() == []
