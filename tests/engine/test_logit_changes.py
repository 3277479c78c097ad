"""What rows change in their logits, and what they tell of them, on the CPU: against a plain model of one row.

Sampling faults that other servers shipped, and the tests that would catch them:

    SP01  ties at the k-th logit            test_sampler.py (kept sets), and test_equal_logits_in_company here
    SP03  a threshold that is estimated     test_sampler.py: against a sort, and test_one_token_with_most_of_the_mass
    SP04  tiny temperatures                 test_tiny_temperatures_are_greedy
    SP07  top_k 0 keeps nothing             test_sampler.py
    SP08  penalties at their bounds         test_penalties_at_their_bounds_cost_nobody_anything
    SP09  a penalty is ignored              test_a_row_is_the_plain_model, tests/worker/test_sampling_features.py
    AP02  bias outside of the vocabulary    test_ids_outside_of_the_vocabulary_are_passed_over
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.request import SamplingParams
from baton.engine.feedback import make_feedback
from baton.engine.logit_changes import bias_arrays
from baton.engine.sampler import HostSampler, SamplingRow
from baton.engine.token_counts import TokenCounts
from baton.kernels import reference
from baton.kernels.reference.sampling import SamplingRule

VOCAB_SIZE = 40
SAMPLER = HostSampler(make_feedback(torch.device("cpu")))


def random_logits(count: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn((count, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3


def mask_of(token_ids: set[int], vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def plain(logits: torch.Tensor, row: SamplingRow, prompt: list[int], output: list[int]) -> int:
    """The token of one row, step by step."""
    params = row.params
    logits = reference.apply_penalties(
        logits, prompt, output, params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    )
    for token_id, bias in params.logit_bias:
        logits[token_id] = float(np.float32(float(logits[token_id]) + bias))
    logits[list(row.suppress)] = -math.inf
    if row.allowed is not None:
        allowed = {t for t in range(len(logits)) if int(row.allowed[t // 32]) >> t % 32 & 1}
        logits[[t for t in range(len(logits)) if t not in allowed]] = -math.inf
    rule = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed, row.choice, row.position)
    return reference.sample(logits, SamplingRule(*rule))


TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, -1, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.4, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 0.3, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100), max_size=6).map(
        lambda bias: tuple(bias.items())
    ),
)
CASES = st.tuples(
    PARAMS, TOKENS, TOKENS, st.sets(st.integers(0, 39), max_size=3), st.none() | st.sets(st.integers(0, 39), min_size=5)
)


@settings(deadline=None, max_examples=60)
@given(st.lists(CASES, min_size=1, max_size=8), st.integers(0, 99))
def test_a_row_is_the_plain_model_alone_and_in_company(cases: list[Any], seed: int) -> None:
    logits = random_logits(len(cases), seed=seed)
    before, rows, expected = logits.clone(), [], []
    for i, (params, prompt, output, suppress, allowed) in enumerate(cases):
        counts = TokenCounts(prompt if params.repetition_penalty != 1 else [], output) if params.has_penalties else None
        mask = None if allowed is None else mask_of(allowed)
        row = SamplingRow(params, i, 7 + i, tuple(suppress), counts=counts, allowed=mask)
        rows.append(row)
        token = plain(logits[i], row, prompt, output)
        expected.append(None if token < 0 else token)
    assert SAMPLER.sample(logits, rows) == expected
    assert [SAMPLER.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == expected
    assert torch.equal(logits, before), "the model's logits are left as they are"


@settings(deadline=None)
@given(TOKENS, TOKENS, TOKENS)
def test_counts_are_kept_as_tokens_come(prompt: list[int], output: list[int], more: list[int]) -> None:
    counts = TokenCounts(prompt, output)
    for token_id in more:
        counts.add(token_id)
    tokens = output + more
    have = dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True))
    assert have == {token: tokens.count(token) for token in {*prompt, *tokens}}


def test_counts_of_many_different_tokens() -> None:
    counts = TokenCounts(range(100), range(50, 1000))
    assert counts.token_ids.tolist() == list(range(1000))
    assert counts.counts.tolist() == [0] * 50 + [1] * 950


def row(**params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), 0, 0)


def test_ids_outside_of_the_vocabulary_are_passed_over() -> None:
    """vllm-project/vllm PR#16529: an unchecked index into the logits."""
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 3] = 1.0
    bias = ((999999, 5.0), (-1, 5.0), (VOCAB_SIZE, 5.0), (4, 2.0))
    rows = [row(temperature=0.0, logit_bias=bias), replace(row(temperature=0.0), suppress=(-1, 10**9, 3))]
    assert SAMPLER.sample(logits, rows) == [4, 0]
    assert bias_arrays(bias, (4,), VOCAB_SIZE)[1].tolist() == [-math.inf]


def test_bias_against_everything_but_one_token_and_for_one() -> None:
    logits = random_logits(2)
    only = tuple((token, -100.0) for token in range(VOCAB_SIZE) if token != 11)
    rows = [row(temperature=1.0, seed=5, logit_bias=only), row(temperature=0.0, logit_bias=((2, 100.0),))]
    assert SAMPLER.sample(logits, rows) == [11, 2]


@pytest.mark.parametrize("repetition", [1e-30, 5e-324, 1e30])
@pytest.mark.parametrize("other", [-2.0, 2.0, -3.0, 3.0])
def test_penalties_at_their_bounds_cost_nobody_anything(repetition: float, other: float) -> None:
    """sgl-project/sglang PR#24874: a division by zero killed the engine. What overflows has no token, alone."""
    logits = random_logits(2)
    wild = SamplingParams(
        repetition_penalty=repetition, presence_penalty=other, frequency_penalty=other, num_logprobs=2
    )
    rows = [SamplingRow(wild, 0, 0, counts=TokenCounts([1, 2], [2, 2])), row(temperature=0.0)]
    launched = SAMPLER.launch(logits, rows)
    assert launched.token_ids()[1] == int(logits[1].argmax())
    assert all(-9999 <= value <= 0 for value in [launched.logprobs()[0].logprob, launched.logprobs()[0].top[1][1]])


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 1e-8])
def test_tiny_temperatures_are_greedy(temperature: float, top_p: float) -> None:
    """vllm-project/vllm #1623: the quotient overflowed."""
    logits = random_logits(8, 1000) * 5
    rows = [row(temperature=temperature, top_p=top_p, seed=seed) for seed in range(8)]
    assert SAMPLER.sample(logits, rows) == logits.argmax(1).tolist()


@pytest.mark.parametrize("vocab_size", [8193, 49152])
@pytest.mark.parametrize(("rule", "num_kept"), [({"top_k": 5}, 5), ({"top_p": 0.9}, 1)])
def test_one_token_with_most_of_the_mass(vocab_size: int, rule: dict[str, Any], num_kept: int) -> None:
    """FlashML-org/FreeToken PR#329: top-k kept the whole vocabulary. A bias of +10 above the best gives 99 %."""
    logits = random_logits(1, vocab_size)[0].clamp(max=4.0)
    logits[17] = 24.0
    best = set(logits.sort(descending=True, stable=True).indices[:num_kept].tolist()) if num_kept == 1 else None
    rows = [row(temperature=4.0 if "top_k" in rule else 1.0, seed=seed, **rule) for seed in range(40)]
    tokens = set(SAMPLER.sample(logits.expand(40, -1), rows))
    floor = float(logits.sort(descending=True).values[num_kept - 1])
    assert all(token is not None and float(logits[token]) >= floor for token in tokens)
    assert best is None or tokens == best


@pytest.mark.parametrize("top_k", range(1, 6))
def test_equal_logits_in_company(top_k: int) -> None:
    """vllm-project/vllm PR#50979: ties at the k-th logit, alone and in a batch of 8."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, 1.0, -1.0, 2.0]] * 8)
    rows = [row(temperature=1.0, top_k=top_k, seed=seed) for seed in range(8)]
    together = SAMPLER.sample(logits, rows)
    assert together == [SAMPLER.sample(logits[:1], [one])[0] for one in rows]
    kept = {0} if top_k == 1 else {0, 7} if top_k == 2 else {0, 1, 2, 3, 5, 7}
    assert set(together) <= kept


def test_logprobs_are_the_models_own_and_only_for_those_who_ask() -> None:
    logits = random_logits(3)
    changed = SamplingParams(
        temperature=0.0, num_logprobs=3, logit_bias=((9, 100.0),), presence_penalty=2.0, repetition_penalty=1.7
    )
    rows = [
        row(temperature=0.0),
        SamplingRow(changed, 0, 5, (3,), counts=TokenCounts([1], [9]), allowed=mask_of({9, 12})),
        row(temperature=0.0, num_logprobs=0),
    ]
    launched = SAMPLER.launch(logits, rows)
    assert launched.token_ids()[1] == 9
    told = launched.logprobs()
    assert told.keys() == {1, 2}
    own = logits.double().log_softmax(1)
    assert told[1].logprob == pytest.approx(float(own[1, 9]), abs=1e-5)
    assert [token for token, _ in told[1].top] == logits[1].topk(3).indices.tolist()
    assert [value for _, value in told[1].top] == pytest.approx(own[1].topk(3).values.tolist(), abs=1e-5)
    assert told[2].logprob == pytest.approx(float(own[2].max()), abs=1e-5)
    assert told[2].top == ()


def test_more_logprobs_than_tokens_are_all() -> None:
    (told,) = SAMPLER.launch(random_logits(1, 3), [row(num_logprobs=20)]).logprobs().values()
    assert len(told.top) == 3
    (scored,) = SAMPLER.score(random_logits(1, 3), [2], 20).read()
    assert len(scored.top) == 3
