"""Sampler against naive models: kept sets by sorting, draws by one loop over core/counted_random.py."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core import counted_random
from baton.core.errors import LocalProtocolError
from baton.core.request import SamplingParams
from baton.engine.feedback import make_feedback
from baton.engine.sampler import HostSampler, SamplingRow, lowest_kept

FEEDBACK = make_feedback(torch.device("cpu"))
SAMPLER = HostSampler(FEEDBACK)


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * scale


def row(choice: int = 0, position: int = 0, suppress: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), choice, position, suppress)


def naive_kept(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """The tokens that pass the filters, found by sorting; equal logits stay or go together."""
    values = [float(x) for x in logits]
    order = sorted(range(len(values)), key=lambda token: -values[token])
    best = values[order[0]]
    if 0 < params.top_k < len(values):
        order = [token for token in order if values[token] >= values[order[params.top_k - 1]]]
    if params.top_p < 1:
        weight = {token: math.exp((values[token] - best) / params.temperature) for token in order}
        wanted, mass, last = params.top_p * math.fsum(weight.values()), 0.0, order[0]
        for token in order:
            mass, last = mass + weight[token], token
            if mass >= wanted:
                break
        order = [token for token in order if values[token] >= values[last]]
    if params.min_p > 0:
        needed = best + math.log(params.min_p) * params.temperature
        order = [token for token in order if values[token] >= needed]
    return set(order)


def naive_draw(logits: torch.Tensor, sampling: SamplingRow) -> int:
    params = sampling.params
    logits = logits.clone()
    logits[list(sampling.suppress)] = -math.inf
    best = float(logits.max())

    def score(token: int) -> float:
        noise = counted_random.gumbel(params.seed, sampling.choice, sampling.position, token)
        return (float(logits[token]) - best) / params.temperature + noise

    return max(sorted(naive_kept(logits, params)), key=score)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 3.0),
    top_k=st.sampled_from([0, -1, 1, 2, 5, 30, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-8]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
# Few distinct values, so that ties occur at every threshold.
TIED_LOGITS = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=40)


@settings(deadline=None, max_examples=200)
@given(TIED_LOGITS, PARAMS)
def test_kept_set_equals_sorting(values: list[float], params: SamplingParams) -> None:
    logits = torch.tensor(values)
    kept = set(torch.nonzero(logits.double() >= lowest_kept(logits, params)).flatten().tolist())
    assert kept == naive_kept(logits, params)


@settings(deadline=None, max_examples=150)
@given(TIED_LOGITS, PARAMS, st.integers(0, 3), st.integers(0, 9000))
def test_draw_equals_the_definition(values: list[float], params: SamplingParams, choice: int, position: int) -> None:
    logits = torch.tensor([values])
    sampling = SamplingRow(params, choice, position)
    expected = int(logits[0].argmax()) if params.greedy else naive_draw(logits[0], sampling)
    assert SAMPLER.sample(logits, [sampling]) == [expected]


@pytest.mark.parametrize("vocab_size", [8193, 320, 7])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    ],
)
def test_draws_over_a_real_sized_vocabulary(params: dict[str, float], vocab_size: int) -> None:
    logits = random_logits(3, vocab_size, seed=vocab_size)
    rows = [row(seed=i, position=10 + i, choice=i, **params) for i in range(3)]
    expected = [naive_draw(x, sampling) for x, sampling in zip(logits, rows, strict=True)]
    assert SAMPLER.sample(logits, rows) == expected


@pytest.mark.parametrize("vocab_size", [49152, 8193])
@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.9}, {"top_k": 1000, "top_p": 0.95}, {"min_p": 0.001}])
def test_one_token_with_most_of_the_mass(vocab_size: int, params: dict[str, float]) -> None:
    """Regression SP03."""
    logits = random_logits(1, vocab_size, scale=1.0)[0]
    for peak in (10.0, 12.0):
        logits[77] = peak
        kept = set(torch.nonzero(logits.double() >= lowest_kept(logits, SamplingParams(**params))).flatten().tolist())
        assert kept == naive_kept(logits, SamplingParams(**params))
        assert 77 in kept


def test_top_p_of_a_flat_distribution_needs_the_whole_sort() -> None:
    logits = random_logits(1, 5000, scale=1.0)[0]
    params = SamplingParams(temperature=0.05, top_p=1 - 1e-9)
    kept = int((logits.double() >= lowest_kept(logits, params)).sum())
    assert kept == len(naive_kept(logits, params))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5])
def test_ties_at_the_kth_logit_are_the_same_alone_and_in_a_batch(top_k: int, batch: int) -> None:
    """Regression SP01: all tokens that equal the k-th stay, in every batch."""
    logits = torch.zeros(batch, 40)
    logits[:, 10] = 1.0
    logits[:, 20:] = -1.0
    rows = [row(seed=0, top_k=top_k, position=p) for p in range(batch)]
    expected = [10 if top_k == 1 else naive_draw(logits[0], sampling) for sampling in rows]
    assert SAMPLER.sample(logits, rows) == expected
    drawn = {SAMPLER.sample(logits[:1], [row(seed=s, top_k=top_k)])[0] for s in range(150)}
    assert drawn <= set(range(20))
    assert (len(drawn) > 5) == (top_k > 1)


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 1e-8])
def test_tiny_temperatures_are_greedy(temperature: float, top_p: float) -> None:
    """Regression SP04. Gaps of 0.1 at 1e-3 are 100 units of z: far more than the noise can bridge."""
    logits = (torch.randperm(4000, generator=torch.Generator().manual_seed(1)) * 0.1).view(4, 1000)
    rows = [row(temperature=temperature, top_p=top_p, seed=seed) for seed in range(4)]
    assert SAMPLER.sample(logits, rows) == logits.argmax(-1).tolist()


def test_below_the_noise_even_ties_are_greedy() -> None:
    assert SAMPLER.sample(torch.ones(1, 50), [row(temperature=1e-12, seed=3)]) == [0]


def test_top_k_that_is_off_or_beyond_the_vocabulary() -> None:
    """Regression SP07: 0, -1, V and V + 1 draw as without it, 1 is greedy; mixed in one batch."""
    logits = random_logits(1, 50, scale=0.5).expand(6, -1)
    rows = [row(seed=9, top_k=top_k) for top_k in (0, -1, 50, 51)]
    plain = SAMPLER.sample(logits[:1], [row(seed=9)])[0]
    greedy = int(logits[0].argmax())
    assert plain != greedy
    assert SAMPLER.sample(logits, [*rows, row(seed=9, top_k=1), row(seed=9, top_p=0.0)]) == [plain] * 4 + [greedy] * 2


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    assert SAMPLER.sample(logits, [row(temperature=0.0), row(temperature=0.0)]) == [1, 0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(PARAMS, st.integers(0, 99)), min_size=1, max_size=6), st.data())
def test_a_row_does_not_depend_on_its_batch_mates(drawn: list[tuple[SamplingParams, int]], data: st.DataObject) -> None:
    logits = random_logits(len(drawn), 203, seed=len(drawn), scale=2.0)
    rows = [SamplingRow(params, 0, position, suppress=(position,)) for params, position in drawn]
    alone = [SAMPLER.sample(logits[i : i + 1], [sampling])[0] for i, sampling in enumerate(rows)]
    order = data.draw(st.permutations(range(len(rows))))
    together = SAMPLER.sample(logits[order], [rows[i] for i in order])
    assert together == [alone[i] for i in order]


def test_suppressed_tokens_never_come_and_the_logits_stay() -> None:
    logits = torch.tensor([[5.0, 9.0, 1.0, 8.0]] * 2)
    before = logits.clone()
    assert SAMPLER.sample(logits, [row(temperature=0.0, suppress=(1, 3)), row(temperature=0.0)]) == [0, 1]
    drawn = {SAMPLER.sample(logits[:1], [row(suppress=(1, 3), temperature=3.0, seed=s)])[0] for s in range(60)}
    assert drawn == {0, 2}
    assert torch.equal(logits, before)


def test_same_seed_same_tokens_other_seed_choice_or_position_others() -> None:
    logits = random_logits(1, 1000, scale=0.1).expand(20, -1)

    def draws(**kwargs: int) -> list[int]:
        position = kwargs.pop("position", 0)
        return SAMPLER.sample(logits, [row(position=position + i, **kwargs) for i in range(20)])

    assert draws(seed=1) == draws(seed=1)
    others = [draws(seed=1), draws(seed=2), draws(seed=1 + 2**32), draws(seed=1, choice=1), draws(seed=1, position=50)]
    assert len({tuple(tokens) for tokens in others}) == 5


def test_frequencies_follow_the_softmax() -> None:
    """5,000 draws of 5 tokens: chi-square with 4 degrees of freedom, 99.99 % below 23.5."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5]])
    count = 5000
    tokens = SAMPLER.sample(logits.expand(count, -1), [row(temperature=1.3, seed=i) for i in range(count)])
    expected = (logits[0].double() / 1.3).softmax(0) * count
    seen = Counter(tokens)
    assert sum((seen[t] - float(expected[t])) ** 2 / float(expected[t]) for t in range(5)) < 23.5


@pytest.mark.parametrize(
    "logits", [torch.full((1, 4), math.nan), torch.full((1, 4), math.inf), torch.full((1, 4), -math.inf)]
)
def test_a_row_without_a_finite_best_has_no_token_and_harms_no_other(logits: torch.Tensor) -> None:
    good = torch.tensor([[0.0, 1.0, 0.5, 2.0]])
    for temperature in (0.0, 1.0):
        one = row(temperature=temperature, seed=5)
        alone = SAMPLER.sample(good, [one])
        assert SAMPLER.sample(torch.cat((good, logits, good)), [one] * 3) == [*alone, None, *alone]
        assert SAMPLER.sample(logits, [one]) == [None]


def test_row_counts_must_agree() -> None:
    with pytest.raises(LocalProtocolError, match="2 rows of logits for 1"):
        SAMPLER.sample(torch.zeros(2, 4), [row()])


def test_no_rows() -> None:
    assert SAMPLER.sample(torch.zeros(0, 4), []) == []
