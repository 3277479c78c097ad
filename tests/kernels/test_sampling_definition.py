"""The definition of sampling, held to the counted random numbers of core and to the sampler that runs on the CPU."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core import counted_random
from baton.core.request import SamplingParams
from baton.engine.sampler import HostSampler, SamplingRow
from baton.kernels import reference
from baton.kernels.reference.sampling import SamplingRule, gumbel

RULES = st.builds(
    SamplingRule,
    temperature=st.sampled_from([0.0, 5e-324, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, 10**6]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-8, 0.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 5),
    position=st.integers(0, 2**31),
)
LOGITS = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0, -math.inf]), min_size=1, max_size=30)


@settings(deadline=None, max_examples=100)
@given(LOGITS, RULES)
def test_the_definition_is_what_the_cpu_samples(values: list[float], rule: SamplingRule) -> None:
    params = SamplingParams(rule.temperature, rule.top_k, rule.top_p, rule.min_p, rule.seed)
    sampler = HostSampler(torch.zeros(1, dtype=torch.int64))
    logits = torch.tensor([values])
    (token,) = sampler.sample(logits, [SamplingRow(params, rule.choice, rule.position)])
    assert reference.sample(logits[0], rule) == (-1 if token is None else token)


@given(st.integers(0, 2**64 - 1), st.integers(0, 9), st.integers(0, 2**31), st.integers(0, 2**18))
def test_noise_is_the_counted_noise(seed: int, choice: int, position: int, token_id: int) -> None:
    rule = SamplingRule(seed=seed, choice=choice, position=position)
    assert gumbel(rule, token_id) == counted_random.gumbel(seed, choice, position, token_id)


def test_rows_without_a_token() -> None:
    for bad in (math.nan, math.inf):
        assert reference.sample(torch.tensor([1.0, bad, 2.0]), SamplingRule()) == -1
    assert reference.sample(torch.full((3,), -math.inf), SamplingRule()) == -1


def test_penalties() -> None:
    logits = torch.tensor([4.0, -4.0, 1.0, 2.0, 0.0])
    actual = reference.apply_penalties(logits, [0, 1, 0], [2, 2, 3], repetition=2.0, presence=0.25, frequency=0.5)
    assert actual.tolist() == [2.0, -8.0, -0.75, 0.25, 0.0]
