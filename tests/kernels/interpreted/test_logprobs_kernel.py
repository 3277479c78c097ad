"""Log-probabilities under the interpreter and on the CPU, against a softmax in fp64 and a sort."""

import math

import pytest
import torch

from baton.kernels import cpu
from baton.kernels.gpu.logprobs import MAX_TOP, token_logprobs

INF = math.inf


def naive(row: torch.Tensor, token_id: int, num_top: int) -> tuple[float, list[float], list[int]]:
    values = row.double().log_softmax(0).tolist()
    order = sorted(range(len(values)), key=lambda t: (-float(row[t]), t))[:num_top]
    return max(values[token_id], -9999.0), [max(values[t], -9999.0) for t in order], order


@pytest.mark.parametrize("vocab_size", [5, 4096, 9001])
@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_both_equal_a_softmax_and_a_sort(vocab_size: int, num_top: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size + num_top)
    buffer = torch.full((4, vocab_size + 3), math.nan)
    logits = buffer[:, 2 : 2 + vocab_size]
    logits.copy_(torch.randn((4, vocab_size), generator=generator) * 4)
    logits[1] = logits[1].round()  # equal logits at every place
    logits[2, vocab_size // 2 :] = -INF
    token_ids = torch.randint(vocab_size, (4,), generator=generator)
    rows = [2, 0, 1]
    on_device = token_logprobs(logits, torch.tensor(rows), token_ids, num_top)
    on_host = cpu.token_logprobs(logits[rows], token_ids[rows], num_top)
    for chosen, top, top_ids in (on_device, on_host):
        for i, row in enumerate(rows):
            value, values, order = naive(logits[row], int(token_ids[row]), num_top)
            assert float(chosen[i]) == pytest.approx(value, abs=1e-5)
            assert top[i].tolist() == pytest.approx(values, abs=1e-5)
            assert top_ids[i].tolist() == order


def test_a_row_gives_the_same_bits_alone() -> None:
    logits = torch.randn((8, 5000), generator=torch.Generator().manual_seed(1))
    token_ids = torch.arange(8)
    together = token_logprobs(logits, torch.arange(8), token_ids, 4)
    together_on_host = cpu.token_logprobs(logits, token_ids, 4)
    for i in range(8):
        alone = token_logprobs(logits, torch.tensor([i]), token_ids, 4)
        on_host = cpu.token_logprobs(logits[i : i + 1], token_ids[i : i + 1], 4)
        for one, all_, host, all_on_host in zip(alone, together, on_host, together_on_host, strict=True):
            assert torch.equal(one[0], all_[i])
            assert torch.equal(host[0], all_on_host[i])


@pytest.mark.parametrize("compute", ["device", "host"])
def test_all_numbers_can_be_told(compute: str) -> None:
    """Also of tokens that cannot come, of a certain one, and of a model that overflowed."""
    logits = torch.tensor([[-INF, 50.0, -INF, -20000.0], [math.nan, 1.0, 0.0, 0.0], [-INF] * 4, [INF, 0.0, 1.0, 2.0]])
    token_ids, rows = torch.tensor([2, 1, 0, 1]), torch.arange(4)
    of = token_logprobs(logits, rows, token_ids, 4) if compute == "device" else cpu.token_logprobs(logits, token_ids, 4)
    assert all(-9999.0 <= value <= 0.0 for tensor in of[:2] for value in tensor.flatten().tolist())
    assert float(of[0][0]) == -9999.0
    assert of[1][0].tolist() == [0.0, -9999.0, -9999.0, -9999.0]
    assert of[2][0].tolist() == [1, 3, 0, 2]


def test_a_whole_vocabulary_of_equal_logits() -> None:
    logits = torch.zeros(1, 8193)
    for _, top, top_ids in (
        token_logprobs(logits, torch.tensor([0]), torch.tensor([5]), MAX_TOP),
        cpu.token_logprobs(logits, torch.tensor([5]), MAX_TOP),
    ):
        assert top_ids[0].tolist() == list(range(MAX_TOP))
        assert top[0].tolist() == pytest.approx([-math.log(8193)] * MAX_TOP, abs=1e-5)


def test_wrong_arguments_are_named() -> None:
    logits, ids = torch.zeros(2, 40), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="num_top is 33"):
        token_logprobs(logits, ids, ids, 33)
    with pytest.raises(ValueError, match="token_ids has shape"):
        token_logprobs(logits, ids, ids[:1], 3)
    assert token_logprobs(logits, ids[:0], ids, 3)[1].shape == (0, 3)
