"""Penalties, bias and masks under the interpreter: exact, and the same as on the CPU."""

import math
import random

import pytest
import torch

from baton.engine.token_counts import TokenCounts
from baton.kernels import cpu, reference
from baton.kernels.gpu.penalties import add_bias, apply_penalties, keep_allowed

INF = math.inf


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_penalties_of_literals() -> None:
    logits = torch.tensor([[4.0, -4.0, 1.0, 2.0, 0.0, -INF]])
    ids, counts = torch.tensor([0, 1, 2, 3, 5]), torch.tensor([0, 0, 2, 1, 1])
    apply_penalties(logits, torch.zeros(5, dtype=torch.int64), ids, counts, floats(2.0), floats(0.25), floats(0.5))
    # 0 and 1 are in the prompt; 2 comes twice in the output, 3 and 5 once.
    assert logits.tolist() == [[2.0, -8.0, 0.5 - 1.25, 1.0 - 0.75, 0.0, -INF]]


def test_random_rows_equal_the_definition_and_the_cpu() -> None:
    rng = random.Random(3)
    num_rows, vocab_size = 4, 691
    buffer = torch.full((num_rows, vocab_size + 9), math.nan)
    logits = buffer[:, 4 : 4 + vocab_size]
    logits.copy_(torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(1)) * 4)
    lengths = [(300, 300), (0, 257), (5, 0), (0, 0)]
    rules = [(1.3, 0.7, -0.2), (0.5, -1.5, 0.1), (1.7, 2.0, 2.0), (3.0, 1.0, 1.0)]
    expected, on_host = buffer.clone(), logits.clone()
    entries: list[tuple[int, int, int]] = []
    for i, ((num_prompt, num_output), rule) in enumerate(zip(lengths, rules, strict=True)):
        prompt, output = ([rng.randrange(vocab_size) for _ in range(n)] for n in (num_prompt, num_output))
        expected[i, 4 : 4 + vocab_size] = reference.apply_penalties(logits[i], prompt, output, *rule)
        counts = TokenCounts(prompt, output)
        cpu.apply_penalties(on_host[i], torch.tensor(counts.token_ids), torch.tensor(counts.counts), *rule)
        entries += [(i, *entry) for entry in zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)]
    columns = [floats(*column) for column in zip(*rules, strict=True)]
    apply_penalties(logits, *(torch.tensor(column) for column in zip(*entries, strict=True)), *columns)
    assert torch.equal(buffer.nan_to_num(1e9), expected.nan_to_num(1e9))
    assert torch.equal(on_host, logits)


def test_neutral_penalties_and_ids_outside_the_vocabulary_change_nothing() -> None:
    logits = torch.tensor([[1.5, -2.5, 0.1], [1.0, 2.0, 3.0]])
    before = logits.clone()
    rows, ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, -1]), torch.tensor([0, 1, 2, -1, 3, 1000, 0, 0])
    apply_penalties(logits, rows, ids, rows.clone().fill_(2), floats(1.0, 9.0), floats(0.0, 9.0), floats(0.0, 9.0))
    assert torch.equal(logits, before)


def test_a_mask_keeps_exactly_its_bits() -> None:
    generator = torch.Generator().manual_seed(5)
    buffer = torch.randn((3, 2100), generator=generator)
    logits, before = buffer[:, 7:2057], buffer.clone()  # 2050 tokens: 64 words and 2 bits
    allowed = torch.randint(-(2**31), 2**31, (2, 65), generator=generator).int()
    keep_allowed(logits, torch.tensor([2, 0]), allowed)
    for row, words in ((2, allowed[0]), (0, allowed[1])):
        bits = [int(words[t // 32]) >> t % 32 & 1 for t in range(2050)]
        expected = before[row, 7:2057].masked_fill(torch.tensor(bits) == 0, -INF)
        assert torch.equal(logits[row], expected)
        on_host = before[row, 7:2057].clone()
        cpu.keep_allowed(on_host, words)
        assert torch.equal(on_host, expected)
    assert torch.equal(logits[1], before[1, 7:2057])
    assert torch.equal(buffer[:, :7], before[:, :7])
    assert torch.equal(buffer[:, 2057:], before[:, 2057:])


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
    logits, ids = torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="counts has shape"):
        apply_penalties(logits, ids, ids, ids[:2], *[floats(1.0, 1.0)] * 3)
    with pytest.raises(ValueError, match="presence has shape"):
        apply_penalties(logits, ids, ids, ids, floats(1.0, 1.0), floats(1.0), floats(1.0, 1.0))
    with pytest.raises(ValueError, match="values has shape"):
        add_bias(logits, ids, ids, floats(1.0))
    with pytest.raises(ValueError, match="allowed has shape"):
        keep_allowed(logits, ids[:1], torch.zeros((1, 2), dtype=torch.int32))
