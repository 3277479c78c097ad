"""The engine with the Triton kernels equals the CPU engine and the oracle: any mix of chunks and decodes."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from baton.core.errors import ConfigurationError
from baton.core.request import SamplingParams
from baton.engine.engine import Engine
from baton.engine.sampler import SamplingRow

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def engines(tiny_qwen3: Path, load: Callable[..., Engine]) -> tuple[Engine, Engine]:
    """(Triton kernels, CPU path) on one model."""
    return load(tiny_qwen3), load(tiny_qwen3, kernels="torch")


@pytest.fixture(scope="module")
def llamas(tiny_model: Path, load: Callable[..., Engine]) -> tuple[Engine, Engine]:
    return load(tiny_model), load(tiny_model, kernels="torch")


def greedy(position: int, slot: int = -1) -> SamplingRow:
    return SamplingRow(SamplingParams(temperature=0.0), 0, position, feedback_slot=slot)


def check_a_mixed_batch(engines, requests, run) -> None:
    """Whole prompts, chunks with a prefix, one that wants nothing, decodes: in two steps."""
    hidden = []
    for engine in engines:
        a, b, c, d = requests([17, 3, 18, 1])
        first = run(engine, a.chunk(17), b.chunk(3, wants_hidden=False), c.chunk(12, wants_hidden=False))
        second = run(engine, a.decode(7), b.decode(9), c.chunk(6), d.chunk(1))
        assert (len(first), len(second)) == (1, 4)
        hidden.append(torch.cat((first, second)))
    torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)
    logits = [engine.runner.logits(hidden[1]) for engine in engines]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_mixed_batch_has_the_hidden_states_of_the_cpu_path(engines, requests, run) -> None:
    check_a_mixed_batch(engines, requests, run)


def test_more_chunks_than_one_launch_of_attention_takes(engines, requests, run, monkeypatch) -> None:
    monkeypatch.setattr("baton.kernels.gpu.kernels.MAX_SEQUENCES", 2)
    hidden = []
    for engine in engines:
        first, *others = requests([2, 1, 3, 1])
        run(engine, first.chunk(2))
        hidden.append(run(engine, first.decode(3), *(request.chunk(len(request.token_ids)) for request in others)))
    torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_mixed_batch_of_a_llama(llamas, requests, run) -> None:
    check_a_mixed_batch(llamas, requests, run)


def test_a_step_may_want_no_hidden_state(engines, requests, run) -> None:
    (request,) = requests([2])
    assert run(engines[0], request.chunk(2, wants_hidden=False)).shape == (0, 64)


def test_greedy_tokens_equal_the_cpu_path_with_every_token_fed_back_on_the_device(llamas, requests, run) -> None:
    """The host launches steps without knowing the tokens in between, as the decode role does."""
    outputs = []
    for engine in llamas:
        a, b = requests([4, 9], seed=3)
        hidden = run(engine, a.chunk(4), b.chunk(9))
        launched = [engine.sampler.launch(engine.runner.logits(hidden), [greedy(4, 2), greedy(9, 5)])]
        for _ in range(2):
            chunks = a.decode(0, feedback_slot=2), b.decode(0, feedback_slot=5)
            rows = [greedy(a.start, 2), greedy(b.start, 5)]
            launched.append(engine.sampler.launch(engine.runner.logits(run(engine, *chunks)), rows))
        assert engine.runner.progress.is_done()
        outputs.append([tokens.token_ids() for tokens in launched])
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0]}) > 1


def test_greedy_tokens_equal_the_oracle(tiny_model: Path, load, requests, run) -> None:
    case = msgspec.json.decode((DATA / "oracle_tiny.json").read_bytes())[1]
    engine = load(tiny_model)
    (request,) = requests([len(case["prompt"])])
    request.token_ids = list(case["prompt"])
    hidden = run(engine, request.chunk(len(case["prompt"])))
    output = []
    for _ in range(3):
        output += engine.sampler.launch(engine.runner.logits(hidden), [greedy(request.start)]).token_ids()
        hidden = run(engine, request.decode(output[-1]))
    assert output == case["output"][:3]


def test_hidden_states_come_to_the_host_and_back(engines, requests, run) -> None:
    (request,) = requests([3])
    engine = engines[0]
    hidden = run(engine, request.chunk(3))
    host = engine.runner.to_host(hidden)
    assert host.dtype == "float32"
    assert torch.equal(engine.runner.logits(torch.from_numpy(host)), engine.runner.logits(hidden))


def test_drawn_and_suppressed_tokens_equal_the_cpu_sampler(engines) -> None:
    logits = torch.randn((4, 320), generator=torch.Generator().manual_seed(1))
    logits[2] = torch.nan
    rows = [
        SamplingRow(SamplingParams(temperature=0.0), 0, 5, suppress=(int(logits[0].argmax()), 3), feedback_slot=0),
        SamplingRow(SamplingParams(seed=2**40 + 7, top_p=0.8), 1, 6, feedback_slot=9),
        SamplingRow(SamplingParams(), 0, 7, feedback_slot=3),
        SamplingRow(SamplingParams(temperature=1.7, top_k=40, min_p=0.02), 0, 8, suppress=(1, 1, 2)),
    ]
    before = logits.clone()
    ours, theirs = (engine.sampler.launch(logits, rows).token_ids() for engine in engines)
    assert ours == theirs
    assert ours[2] is None
    assert torch.equal(logits[0], before[0])


@pytest.mark.parametrize("rule", [{"top_k": 2}, {"top_p": 0.05}, {"min_p": 0.6}, {}])
def test_a_rule_holds_when_no_other_row_has_one(engines, rule: dict[str, float]) -> None:
    logits = torch.randn((3, 320), generator=torch.Generator().manual_seed(4))
    rows = [SamplingRow(SamplingParams(seed=i, **rule), 0, 5) for i in range(3)]
    ours, theirs = (engine.sampler.launch(logits, rows).token_ids() for engine in engines)
    assert ours == theirs


@pytest.mark.parametrize("deterministic", [False, True])
def test_half_precision_from_the_weights_to_the_cache(
    tiny_qwen3: Path, engines, load, requests, run, deterministic
) -> None:
    """As bfloat16 on a GPU: half-precision activations and cache, float32 logits and states on the host."""
    half = load(tiny_qwen3, dtype="float16", deterministic=deterministic)
    assert half.layout.wire_digest == "2x2x2x16:float16"
    hidden = []
    for engine in (half, engines[1]):
        (request,) = requests([3])
        run(engine, request.chunk(3))
        hidden.append(run(engine, request.decode(5)))
    ours, exact = hidden
    assert ours.dtype == torch.float16
    assert (ours - exact).norm() < 0.01 * exact.norm()
    state = torch.from_numpy(half.runner.to_host(ours))
    assert state.dtype == torch.float32
    logits, expected = half.runner.logits(state), engines[1].runner.logits(exact)
    assert logits.dtype == torch.float32
    assert (logits - expected).norm() < 0.01 * expected.norm()


def test_int8_weights_stay_close(tiny_model: Path, load, requests, run) -> None:
    exact, packed = load(tiny_model, kernels="torch"), load(tiny_model, dtype="int8")
    (request,) = requests([6])
    expected = run(exact, request.chunk(6))
    request.start = 0
    actual = run(packed, request.chunk(6))
    assert 0 < (actual - expected).norm() < 0.05 * expected.norm()


def test_settings_that_cannot_run_are_refused(tiny_model: Path, load) -> None:
    with pytest.raises(ConfigurationError, match="dtype 'bfloat16' is not supported on device 'cpu'"):
        load(tiny_model, dtype="bfloat16")
    with pytest.raises(ConfigurationError, match="5000 running sequences are more than the 1024"):
        load(tiny_model, max_batch=5000)
