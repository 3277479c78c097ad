"""Log-probabilities of a prompt on a real (tiny) model: transformers' numbers, however prompt and logits are cut."""

from pathlib import Path

import pytest
import torch

from baton.core.config import EngineConfig
from baton.engine import scoring
from baton.engine.engine import load_engine
from baton.engine.forward_batch import Chunk, build_forward_batch

TOKEN_IDS = torch.randint(0, 320, (90,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize(("chunk_size", "rows"), [(90, 1000), (17, 5), (40, 1)])
def test_scores_equal_transformers(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, chunk_size: int, rows: int
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKEN_IDS])).logits[0].double().log_softmax(1)
    engine = load_engine(EngineConfig(str(tiny_model), "cpu", "torch", "float32", 16, 8, 1))
    vocab_size = engine.model_config.vocab_size
    monkeypatch.setattr(scoring, "_SLICE_BYTES", rows * 4 * vocab_size)
    told = []
    for start in range(0, len(TOKEN_IDS), chunk_size):
        tokens = TOKEN_IDS[start : start + chunk_size]
        chunk = Chunk(tokens, start, range(6), wants_hidden=False, wants_every_hidden=True)
        hidden = engine.runner.forward(build_forward_batch([chunk], 16))
        targets = TOKEN_IDS[start + 1 : start + chunk_size + 1]
        slices = scoring.launch_scores(engine.runner, engine.sampler, hidden[: len(targets)], targets, 3, vocab_size)
        assert len(slices) == -(-len(targets) // rows)
        told += [score for part in slices for score in part.read()]
    assert len(told) == len(TOKEN_IDS) - 1
    for i, score in enumerate(told):
        assert score.logprob == pytest.approx(float(expected[i, TOKEN_IDS[i + 1]]), abs=1e-4)
        values, ids = expected[i].topk(3)
        assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert [token for token, _ in score.top] == ids.tolist()


def test_a_slice_of_logits_has_a_bound() -> None:
    assert scoring.rows_per_slice(49152) == 341
    assert scoring.rows_per_slice(128256) == 130
    assert scoring.rows_per_slice(10**9) == 1
