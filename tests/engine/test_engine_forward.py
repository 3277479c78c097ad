"""load_engine and ModelRunner: the same hidden states however the work is cut, whatever the rest of the pool holds."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import EngineConfig
from baton.core.errors import ConfigurationError
from baton.core.request import SamplingParams
from baton.engine.engine import Engine, load_engine
from baton.engine.forward_batch import Chunk, build_forward_batch
from baton.engine.sampler import SamplingRow

NUM_TOKENS = 2048  # of the pool, whatever its block size
TOKEN_IDS = torch.randint(0, 320, (90,), generator=torch.Generator().manual_seed(5)).tolist()


def config(folder: Path, **changes: object) -> EngineConfig:
    settings = {
        "device": "cpu",
        "kernels": "torch",
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 128,
        "threads": 1,
    }
    return EngineConfig(model_folder=str(folder), **{**settings, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[1, 16, 64])
def engine(tiny_model: Path, request: pytest.FixtureRequest) -> Engine:
    return load_engine(config(tiny_model, block_size=request.param, num_blocks=NUM_TOKENS // request.param))


class Sequence:
    """A prompt at scattered blocks, computed chunk by chunk."""

    def __init__(self, engine: Engine, token_ids: list[int], free: list[int]):
        self.engine, self.token_ids, self.start = engine, token_ids, 0
        self.table = [free.pop() for _ in range(engine.layout.num_blocks(len(token_ids)))]

    def chunk(self, count: int, wants_hidden: bool = True) -> Chunk:
        start, self.start = self.start, self.start + count
        return Chunk(self.token_ids[start : self.start], start, self.table, wants_hidden)


def scattered(engine: Engine, seed: int = 0) -> list[int]:
    """All block ids in random order; the pool is poisoned with NaN."""
    for layer in engine.pool.layers:
        layer.fill_(torch.nan)
    ids = list(range(engine.pool.num_blocks))
    random.Random(seed).shuffle(ids)
    return ids


def run(engine: Engine, *chunks: Chunk) -> torch.Tensor:
    return engine.runner.forward(build_forward_batch(list(chunks), engine.layout.block_size))


def hidden_of(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """The last hidden state of a prompt computed alone in one pass, `[1, hidden_size]`."""
    return run(engine, Sequence(engine, token_ids, scattered(engine)).chunk(len(token_ids)))


def test_logits_equal_transformers_at_every_position(engine: Engine, tiny_model: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKEN_IDS])).logits[0]
    sequence = Sequence(engine, TOKEN_IDS, scattered(engine))
    for position in range(len(TOKEN_IDS)):
        logits = engine.runner.logits(run(engine, sequence.chunk(1)))
        torch.testing.assert_close(logits[0], expected[position], rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=15)
@given(cuts=st.lists(st.integers(1, 89), max_size=6, unique=True), seed=st.integers(0, 99))
def test_any_split_into_chunks_gives_the_same(engine: Engine, cuts: list[int], seed: int) -> None:
    expected = hidden_of(engine, TOKEN_IDS)
    sequence = Sequence(engine, TOKEN_IDS, scattered(engine, seed))
    ends = [*sorted(cuts), len(TOKEN_IDS)]
    for end in ends:
        last = end == len(TOKEN_IDS)
        hidden = run(engine, sequence.chunk(end - sequence.start, wants_hidden=last))
        assert hidden.shape == (int(last), engine.model_config.hidden_size)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_a_mixed_batch_equals_each_sequence_alone(engine: Engine) -> None:
    """Prompt chunks with and without a prefix, decodes at and beside block borders, one that wants no hidden state."""
    prompts = [TOKEN_IDS[i:] + TOKEN_IDS[:i] for i in range(6)]
    lengths = [90, 1, 17, 64, 65, 33]
    expected = [hidden_of(engine, ids[:length]) for ids, length in zip(prompts, lengths, strict=True)]
    free = scattered(engine, 3)
    sequences = [Sequence(engine, ids[:length], free) for ids, length in zip(prompts, lengths, strict=True)]
    before = [50, 0, 0, 63, 64, 30]
    run(engine, *(s.chunk(n, wants_hidden=False) for s, n in zip(sequences, before, strict=True) if n))
    chunks = [s.chunk(len(s.token_ids) - s.start, wants_hidden=i != 2) for i, s in enumerate(sequences)]
    hidden = run(engine, *chunks)
    torch.testing.assert_close(hidden, torch.cat(expected[:2] + expected[3:]), rtol=1e-5, atol=1e-5)


def test_only_the_slots_of_the_batch_change(engine: Engine) -> None:
    free = scattered(engine, 1)
    sequence = Sequence(engine, TOKEN_IDS, free)
    run(engine, sequence.chunk(70))
    before = torch.stack(engine.pool.layers)
    run(engine, sequence.chunk(13))
    after = torch.stack(engine.pool.layers)
    size = engine.layout.block_size
    written = torch.zeros(engine.pool.num_blocks, size, dtype=torch.bool)
    for t in range(70, 83):
        written[sequence.table[t // size], t % size] = True
    same = (before == after) | (before.isnan() & after.isnan())
    changed = ~same.movedim(4, 2).flatten(3)  # [num_layers, num_blocks, block_size, numbers of the slot]
    assert torch.equal(changed.any(-1), written.expand(engine.layout.num_layers, -1, -1))
    assert changed[:, written].all()


def test_kv_moved_to_other_blocks_serves_as_well(engine: Engine) -> None:
    """What a hand-over does: gather here, scatter there, go on there."""
    expected = hidden_of(engine, TOKEN_IDS)
    free = scattered(engine, 2)
    source, target = Sequence(engine, TOKEN_IDS, free), Sequence(engine, TOKEN_IDS, free)
    run(engine, source.chunk(80))
    buffer = bytearray(engine.pool.piece_bytes(80))
    for start, stop in [(0, 1), (1, 37), (37, 80)]:
        size = engine.pool.gather(source.table, start, stop, memoryview(buffer))
        engine.pool.scatter(target.table, start, stop, memoryview(buffer)[:size])
    target.start = 80
    torch.testing.assert_close(run(engine, target.chunk(10)), expected, rtol=1e-5, atol=1e-5)


def test_shared_blocks_serve_several_sequences_at_once(engine: Engine) -> None:
    size = engine.layout.block_size
    free = scattered(engine, 4)
    first = Sequence(engine, TOKEN_IDS, free)
    run(engine, first.chunk(90))
    second = Sequence(engine, TOKEN_IDS[:64] + TOKEN_IDS[5:20], free)
    second.table[: 64 // size] = first.table[: 64 // size]
    second.start = 64
    expected = run(engine, second.chunk(15))
    torch.testing.assert_close(hidden_of(engine, second.token_ids), expected, rtol=1e-5, atol=1e-5)


def test_tokens_that_only_the_device_knows_are_read_from_their_slots(engine: Engine) -> None:
    """Two steps are launched before the host looks at a token; another sequence brings its own."""
    free = scattered(engine, 6)
    prompts = [TOKEN_IDS[:20], TOKEN_IDS[20:33]]
    rows = [[SamplingRow(SamplingParams(temperature=0.0), 0, 0, feedback_slot=slot)] for slot in (7, -1)]

    first = Sequence(engine, prompts[0] + [0] * 2, free)
    token = engine.sampler.launch(engine.runner.logits(run(engine, first.chunk(20))), rows[0])
    other = Sequence(engine, prompts[1] + [5], free)
    run(engine, other.chunk(13))
    chunks = [
        Chunk([0], 20, first.table, True, is_decode=True, feedback_slot=7),
        Chunk([5], 13, other.table, True, is_decode=True),
    ]
    hidden = run(engine, *chunks)
    known = prompts[0] + token.token_ids()
    torch.testing.assert_close(hidden, torch.cat([hidden_of(engine, ids) for ids in (known, other.token_ids)]))
    assert chunks[0].token_ids == [0]


def test_a_step_is_over_when_it_is_launched(engine: Engine) -> None:
    hidden = hidden_of(engine, TOKEN_IDS)
    assert not engine.overlaps
    assert engine.runner.progress.is_done()
    assert engine.runner.progress.layers_done() == 2
    assert engine.runner.to_host(hidden).tolist() == hidden.tolist()


def test_tokens_computed_are_counted(tiny_model: Path) -> None:
    engine = load_engine(config(tiny_model))
    assert engine.runner.num_tokens_computed == 0
    run(engine, Chunk([1, 2, 3], 0, [0], True), Chunk([4], 0, [1], False))
    assert engine.runner.num_tokens_computed == 4
    engine.runner.logits(torch.zeros(2, engine.model_config.hidden_size))
    assert engine.runner.num_tokens_computed == 4


def test_fp16_engine_is_close(tiny_model: Path) -> None:
    exact, half = (load_engine(config(tiny_model, dtype=dtype)) for dtype in ("float32", "float16"))
    expected, actual = hidden_of(exact, TOKEN_IDS), hidden_of(half, TOKEN_IDS)
    assert (actual - expected).norm() < 0.01 * expected.norm()
    assert half.runner.logits(actual).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deterministic": True}, "deterministic=True needs kernels 'triton'"),
        ({"kernels": "triton"}, "only under Triton's interpreter"),
        ({"device": "cuda"}, "kernels 'torch' do not run on device 'cuda'"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
    ],
)
def test_settings_that_cannot_run_are_refused(tiny_model: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_engine(config(tiny_model, **change))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(tiny_model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"device 'cuda': torch .* sees no GPU\. Check nvidia-smi"):
        load_engine(config(tiny_model, device="cuda", kernels="triton"))


def test_layout_follows_the_model(tiny_model: Path) -> None:
    engine = load_engine(config(tiny_model, block_size=8, num_blocks=5))
    assert engine.layout.wire_digest == "2x2x2x16:float32"
    assert (engine.layout.block_size, engine.pool.num_blocks) == (8, 5)
    assert engine.pool.layer(0).shape == (5, 2, 2, 8, 16)
