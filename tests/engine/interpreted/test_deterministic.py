"""deterministic=True: a request's logits are the same bits whatever shares its batch and however it is cut."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def engine(tiny_qwen3: Path, load):
    return load(tiny_qwen3, deterministic=True)


def test_alone_in_a_batch_elsewhere_and_in_other_chunks(engine, requests, run) -> None:
    def logits_of(row: int, *chunks) -> torch.Tensor:
        return engine.runner.logits(run(engine, *chunks))[row]

    (alone,) = requests([7])
    prompt = logits_of(0, alone.chunk(7))
    decoded = logits_of(0, alone.decode(5))

    one, other, two, three, four = requests([2, 7, 1, 3, 1], seed=4)
    other.token_ids = alone.token_ids[:7]
    assert torch.equal(prompt, logits_of(2, one.chunk(2), two.chunk(1), other.chunk(7), three.chunk(3), four.chunk(1)))
    mates = [request.decode(9) for request in (four, three, two, one)]
    assert torch.equal(decoded, logits_of(3, *mates[:3], other.decode(5), mates[3]))

    (cut,) = requests([7], seed=5)
    cut.token_ids = alone.token_ids[:7]
    one.token_ids += [8, 8]
    run(engine, cut.chunk(3, wants_hidden=False), one.chunk(1))
    run(engine, one.chunk(1, is_decode=True), cut.chunk(1, wants_hidden=False))
    assert torch.equal(prompt, logits_of(0, cut.chunk(3)))
