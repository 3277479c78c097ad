"""DeviceSampler under the interpreter: the tokens and log-probabilities of the CPU's sampler, whatever rows change."""

import random

import numpy as np
import pytest
import torch

from baton.core.request import SamplingParams
from baton.engine.device_sampler import DeviceSampler
from baton.engine.feedback import make_feedback
from baton.engine.sampler import HostSampler, SamplingRow
from baton.engine.token_counts import TokenCounts

VOCAB_SIZE = 4500
CPU = torch.device("cpu")


def random_row(rng: random.Random, index: int) -> SamplingRow:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.8, 1.4]),
        top_k=rng.choice([0, 20]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.getrandbits(64),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, -0.4]),
        logit_bias=tuple((rng.randrange(-5, VOCAB_SIZE + 5), rng.uniform(-9, 9)) for _ in range(rng.choice([0, 4]))),
        num_logprobs=rng.choice([None, 0, 5]),
    )
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(300)]
    counts = TokenCounts(tokens[:200], tokens[200:] * 2) if params.has_penalties else None
    bits = np.random.default_rng(index).integers(-(2**31), 2**31, -(-VOCAB_SIZE // 32)).astype(np.int32)
    suppress = tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 3])))
    return SamplingRow(params, index % 2, 10 + index, suppress, index, counts, rng.choice([None, bits]))


@pytest.mark.parametrize("seed", range(3))
def test_equal_to_the_cpu(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng, index) for index in range(8)]
    logits = torch.randn((8, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)) * 3
    before, feedback = logits.clone(), make_feedback(CPU)
    device, host = DeviceSampler(feedback), HostSampler(make_feedback(CPU))
    got, want = device.launch(logits, rows), host.launch(logits, rows)
    assert got.token_ids() == want.token_ids()
    assert feedback[:8].tolist() == want.token_ids()
    assert torch.equal(logits, before)
    assert (
        got.logprobs().keys()
        == want.logprobs().keys()
        == {i for i, r in enumerate(rows) if r.params.num_logprobs is not None}
    )
    for index, told in want.logprobs().items():
        assert got.logprobs()[index].logprob == pytest.approx(told.logprob, abs=1e-5)
        assert [token for token, _ in got.logprobs()[index].top] == [token for token, _ in told.top]
    for index in (0, 5):  # alone: the same bits
        alone = device.launch(logits[index : index + 1], rows[index : index + 1])
        assert alone.token_ids() == want.token_ids()[index : index + 1]
        assert alone.logprobs().get(0) == got.logprobs().get(index)


def test_scores_of_given_tokens_equal_the_cpu() -> None:
    logits = torch.randn((5, 700), generator=torch.Generator().manual_seed(1)) * 3
    token_ids = [3, 699, 0, 3, 12]
    got = DeviceSampler(make_feedback(CPU)).score(logits, token_ids, 4).read()
    want = HostSampler(make_feedback(CPU)).score(logits, token_ids, 4).read()
    assert [one.logprob for one in got] == pytest.approx([one.logprob for one in want], abs=1e-5)
    assert [[token for token, _ in one.top] for one in got] == [[token for token, _ in one.top] for one in want]


def test_a_row_of_which_nothing_is_allowed_has_no_token_and_costs_the_others_none() -> None:
    logits = torch.randn((2, 100), generator=torch.Generator().manual_seed(2))
    rows = [
        SamplingRow(SamplingParams(seed=1), 0, 0, allowed=np.zeros(4, np.int32)),
        SamplingRow(SamplingParams(temperature=0.0), 0, 0),
    ]
    assert DeviceSampler(make_feedback(CPU)).launch(logits, rows).token_ids() == [None, int(logits[1].argmax())]
