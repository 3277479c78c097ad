"""Penalties and bias under the interpreter: exact, whatever the order of the occurrences."""

import math
import random

import pytest
import torch

from baton.kernels import reference
from baton.kernels.gpu.penalties import add_bias, apply_penalties

INF = math.inf


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_penalties_of_literals() -> None:
    logits = torch.tensor([[4.0, -4.0, 1.0, 2.0, 0.0, -INF]])
    token_ids = torch.tensor([[0, 1, 0, 2, 2, 3, 5, 4]], dtype=torch.int32)  # the last one is not counted
    lengths = torch.tensor([3]), torch.tensor([7])
    apply_penalties(logits, token_ids, *lengths, floats(2.0), floats(0.25), floats(0.5))
    # 0 and 1 are in the prompt; 2 comes twice in the output, 3 and 5 once.
    assert logits.tolist() == [[2.0, -8.0, 0.5 - 1.25, 1.0 - 0.75, 0.0, -INF]]


def test_random_rows_equal_the_definition() -> None:
    rng = random.Random(3)
    num_rows, length, vocab_size = 4, 600, 91
    buffer = torch.full((num_rows, vocab_size + 9), math.nan)
    logits = buffer[:, 4 : 4 + vocab_size]
    logits.copy_(torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(1)) * 4)
    prompts, totals = [300, 0, 5, 0], [600, 257, 5, 0]
    lists = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(num_rows)]
    rules = [(1.3, 0.7, -0.2), (0.5, -1.5, 0.1), (1.7, 2.0, 2.0), (3.0, 1.0, 1.0)]
    expected = buffer.clone()
    for i, (ids, rule) in enumerate(zip(lists, rules, strict=True)):
        prompt, output = ids[: prompts[i]], ids[prompts[i] : totals[i]]
        expected[i, 4 : 4 + vocab_size] = reference.apply_penalties(logits[i], prompt, output, *rule)
    counts = torch.zeros((num_rows + 1, vocab_size), dtype=torch.int32)
    columns = [floats(*column) for column in zip(*rules, strict=True)]
    apply_penalties(logits, torch.tensor(lists), torch.tensor(prompts), torch.tensor(totals), *columns, counts=counts)
    assert torch.equal(buffer.nan_to_num(1e9), expected.nan_to_num(1e9))
    assert not counts.any()


def test_neutral_penalties_and_ids_outside_the_vocabulary_change_nothing() -> None:
    logits = torch.tensor([[1.5, -2.5, 0.1], [1.0, 2.0, 3.0]])
    before = logits.clone()
    ids = torch.tensor([[0, 1, 2, 1], [-1, 3, 1000, -5]])
    lengths = torch.tensor([1, 2]), torch.tensor([4, 4])
    apply_penalties(logits, ids, *lengths, floats(1.0, 9.0), floats(0.0, 9.0), floats(0.0, 9.0))
    assert torch.equal(logits, before)


def test_a_length_beyond_the_row_reads_no_further() -> None:
    logits = torch.ones(2, 4)
    ids = torch.tensor([[0, 0, 1, 1], [2, 2, 3, 3]])[:, :2]
    apply_penalties(logits, ids, torch.tensor([0, 0]), torch.tensor([4, 4]), *[floats(1.0, 1.0)] * 3)
    assert logits.tolist() == [[-2.0, 1.0, 1.0, 1.0], [1.0, 1.0, -2.0, 1.0]]


def test_bias() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    rows, ids = torch.tensor([0, 1, 1, 2, 0, 0]), torch.tensor([2, 0, 1, 0, 3, -1])
    add_bias(logits, rows, ids, floats(-INF, 0.5, -2.0, 9.0, 9.0, 9.0))
    assert logits.tolist() == [[1.0, 2.0, -INF], [4.5, 3.0, 6.0]]
    add_bias(logits, rows[:0], ids[:0], floats())
    assert logits.tolist() == [[1.0, 2.0, -INF], [4.5, 3.0, 6.0]]


def test_bias_over_several_programs_of_a_row_view() -> None:
    buffer = torch.zeros(3, 700)
    ids = torch.arange(600)
    add_bias(buffer[:, 50:650], torch.full((600,), 1), ids, ids.double())
    expected = torch.zeros(3, 700)
    expected[1, 50:650] = ids.float()
    assert torch.equal(buffer, expected)


def test_wrong_arguments_are_named() -> None:
    logits, ids = torch.zeros(2, 4), torch.zeros((2, 3), dtype=torch.int32)
    lengths = torch.zeros(2, dtype=torch.int64)
    rules = [floats(1.0, 1.0)] * 3
    with pytest.raises(ValueError, match="token_ids has shape"):
        apply_penalties(logits, ids[:1], lengths, lengths, *rules)
    with pytest.raises(ValueError, match="counts has too few rows"):
        apply_penalties(logits, ids, lengths, lengths, *rules, counts=torch.zeros((1, 4), dtype=torch.int32))
    with pytest.raises(ValueError, match="values has shape"):
        add_bias(logits, lengths, lengths, floats(1.0))
