"""GraphRunner with graphs that call the step again: padding, static buffers and buckets give what eager steps give."""

from pathlib import Path

import pytest
import torch

from baton.core.request import SamplingParams
from baton.engine.engine import Engine
from baton.engine.feedback import make_feedback
from baton.engine.forward_batch import Chunk, build_forward_batch
from baton.engine.graph_runner import GraphRunner, Step, buckets_up_to
from baton.engine.model_runner import ModelRunner
from baton.engine.sampler import SamplingRow
from baton.kernels.gpu.decode_attention import DecodeWorkspace

MAX_BATCH, MAX_BLOCKS = 4, 4


class CalledAgain:
    """A GraphCapture: its graph runs the step and returns the tensor of the capture, as a real one does."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replays = 0

    def __call__(self, step: Step) -> Step:
        self.num_captured += 1
        static = step()

        def replay() -> torch.Tensor:
            self.num_replays += 1
            return static.copy_(step())

        return replay


class WithGraphs:
    """An engine whose decodes go through graphs; `eager` is its own twin with another pool."""

    def __init__(self, folder: Path, load):
        self.eager: Engine = load(folder)
        engine: Engine = load(folder)
        self.engine = engine
        self.capture = CalledAgain()
        self.graphs = GraphRunner(
            engine.runner.model,
            engine.pool,
            engine.sampler._feedback,
            DecodeWorkspace.allocate(MAX_BATCH, 400, 4, 16, "cpu"),
            MAX_BATCH,
            MAX_BLOCKS,
        )
        self.graphs.capture(self.capture)
        self.runner = ModelRunner(
            engine.runner.model, engine.pool, engine.runner._stager, torch.device("cpu"), self.graphs
        )

    def both(self, *chunks: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        batch = build_forward_batch(chunks, 16)
        return self.runner.forward(batch), self.eager.runner.forward(batch)


@pytest.fixture(scope="module")
def twins(tiny_model: Path, load) -> WithGraphs:
    return WithGraphs(tiny_model, load)


def test_buckets() -> None:
    assert buckets_up_to(0) == []
    assert buckets_up_to(1) == [1]
    assert buckets_up_to(5) == [1, 2, 4, 5]
    assert buckets_up_to(8) == [1, 2, 4, 8]
    assert buckets_up_to(30) == [1, 2, 4, 8, 16, 24, 30]
    assert buckets_up_to(256)[-3:] == [240, 248, 256]


def test_decodes_through_graphs_equal_eager_ones(twins: WithGraphs, requests) -> None:
    """Batches shrink and grow, so that buffers hold what larger and older steps left."""
    assert twins.capture.num_captured == 3
    sequences = requests([2, 15, 1])
    hidden = twins.both(*(s.chunk(len(s.token_ids)) for s in sequences))
    assert torch.equal(*hidden)
    assert twins.capture.num_replays == 0
    a, b, c = sequences
    for step in [(a, b, c), (b,), (c, b)]:
        for slot, sequence in enumerate(step):  # what the sampler would leave in the slots
            for engine in (twins.engine, twins.eager):
                engine.sampler._feedback[slot] = 7 * sequence.start
        # The first token is on the host, the others only on the device.
        chunks = [s.decode(0, feedback_slot=slot if slot else -1) for slot, s in enumerate(step)]
        replays = twins.capture.num_replays
        # torch's matrix products on the CPU may round the rows of a padded batch in another way.
        torch.testing.assert_close(*twins.both(*chunks), rtol=1e-5, atol=1e-5)
        assert twins.capture.num_replays == replays + 1
    for ours, theirs in zip(twins.engine.pool.layers, twins.eager.pool.layers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)  # padding stores nothing
    assert twins.runner.num_tokens_computed == twins.eager.runner.num_tokens_computed
    assert twins.runner.progress.layers_done() == 2


def decode(num_blocks: int = 1, length: int = 3, **flags: object) -> Chunk:
    return Chunk([1], length - 1, range(num_blocks), True, is_decode=True, **flags)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chunks", "fits"),
    [
        ([decode()] * 4, True),
        ([decode(4, 64)], True),
        ([decode()] * 5, False),  # more than the largest bucket
        ([decode(5, 65)], False),  # a table wider than the buffer
        ([decode(), Chunk([1], 0, [1], True)], False),  # a prompt's chunk, though of one token
        ([Chunk([1], 2, [1], False, is_decode=True)], False),  # its hidden state must not be handed out
    ],
)
def test_what_fits_a_graph(twins: WithGraphs, chunks: list[Chunk], fits: bool) -> None:
    assert twins.graphs.fits(build_forward_batch(chunks, 16)) is fits


def test_contexts_beyond_the_workspace_run_eagerly(twins: WithGraphs, requests) -> None:
    """Many that share blocks: more tokens in all than were planned for. The tokens are those of a batch that fits."""
    one_piece = DecodeWorkspace.allocate(0, 256, 4, 16, "cpu")
    model, pool = twins.engine.runner.model, twins.engine.pool
    graphs = GraphRunner(model, pool, make_feedback(torch.device("cpu")), one_piece, 2, 3)
    batch = build_forward_batch([decode(), decode()], 16)
    assert not graphs.fits(batch)
    sequences = requests([2, 3])
    twins.both(*(s.chunk(len(s.token_ids)) for s in sequences))
    chunks = [s.decode(4) for s in sequences]
    stager, runner = twins.engine.runner._stager, twins.engine.runner
    expected = runner.forward(build_forward_batch(chunks, 16))
    stager._workspace, usual = one_piece, stager._workspace
    try:
        assert torch.equal(runner.forward(build_forward_batch(chunks, 16)), expected)
    finally:
        stager._workspace = usual


def test_a_token_that_could_not_be_sampled_harms_nobody(twins: WithGraphs, requests) -> None:
    """Its slot holds -1, no id of the vocabulary: the device must not be asked for it."""
    (request,) = requests([2])
    twins.both(request.chunk(2))
    logits = torch.full((1, 320), torch.nan)
    row = SamplingRow(SamplingParams(temperature=0.0), 0, 2, feedback_slot=3)
    for engine in (twins.engine, twins.eager):
        assert engine.sampler.launch(logits, [row]).token_ids() == [None]
        assert int(engine.sampler._feedback[3]) == -1
    ours, theirs = twins.both(request.decode(0, feedback_slot=3))
    assert torch.equal(ours, theirs)
    assert ours.isfinite().all()
