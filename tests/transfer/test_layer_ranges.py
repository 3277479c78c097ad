"""Pieces of some layers: each (token, layer) once, against a plain set of pairs."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from baton.core.errors import LocalProtocolError, RemoteProtocolError
from baton.core.layout import BlockLayout
from baton.core.messages import KVCommit
from baton.core.timeline import Timeline
from baton.transfer.coverage import Coverage, PieceRange
from baton.transfer.session import KVReceiver, KVSender, ReceiverPhase

NUM_TOKENS, NUM_LAYERS = 12, 5


def cells(piece: PieceRange) -> set[tuple[int, int]]:
    return set(product(range(piece.start, piece.stop), range(piece.first_layer, piece.last_layer)))


def sender(num_layers: int = 4) -> KVSender:
    return KVSender("r", 10, num_layers, 0.0, 30.0)


def test_bytes_of_a_layer_range() -> None:
    layout = BlockLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=16, dtype="float16")
    assert layout.piece_bytes(5, 2) == 5 * 2 * 2 * 2 * 4 * 2
    assert layout.piece_bytes(1, 3) == layout.bytes_per_token == 96


def test_layers_of_a_chunk_then_the_rest_of_it() -> None:
    s = sender()
    s.granted(2, 1, 0.0)
    s.computing(6, 0, 0.0)
    assert s.next_range(100) is None
    s.computing(6, 1, 0.0)
    assert s.next_range(100) == (2, 6, 0, 1)
    s.computing(6, 3, 0.0)
    s.computed(6, 0.0)
    assert [s.next_range(100), s.next_range(100)] == [(2, 6, 1, 4), None]
    s.computing(10, 2, 0.0)
    assert [s.next_range(4), s.next_range(100), s.next_range(100)] == [(6, 8, 0, 2), (8, 10, 0, 2), None]
    s.computed(10, 0.0)
    assert s.next_range(100) == (6, 10, 2, 4)


def test_what_waits_for_credits_becomes_whole_again() -> None:
    s = sender()
    for stop in (4, 10):
        for layers in (1, 2, 3, 4):
            s.computing(stop, layers, 0.0)
        s.computed(stop, 0.0)
    s.granted(3, 1, 0.0)
    assert [s.next_range(100), s.next_range(100)] == [(3, 10, 0, 4), None]


def test_a_slot_smaller_than_a_token_takes_its_layers_in_parts() -> None:
    s = sender()
    s.granted(0, 1, 0.0)
    s.computed(2, 0.0)
    pieces = [s.next_range(3) for _ in range(5)]
    assert pieces == [(0, 1, 0, 3), (0, 1, 3, 4), (1, 2, 0, 3), (1, 2, 3, 4), None]


@pytest.mark.parametrize(("stop", "layers"), [(6, 1), (7, 3), (5, 3), (6, 5), (6, -1), (11, 3)])
def test_progress_that_makes_no_sense(stop: int, layers: int) -> None:
    s = sender()
    s.computed(3, 0.0)
    s.computing(6, 2, 0.0)
    with pytest.raises(LocalProtocolError):
        s.computing(stop, layers, 0.0)
    for wrong in (4, 7):
        with pytest.raises(LocalProtocolError):
            s.computed(wrong, 0.0)
    s.computed(3, 0.0)  # nothing new
    s.computed(6, 0.0)
    for wrong in (5, 6):
        with pytest.raises(LocalProtocolError):
            s.computing(wrong, 1, 0.0)


def test_not_finished_while_layers_are_missing() -> None:
    s = sender()
    s.computing(10, 4, 0.0)
    with pytest.raises(LocalProtocolError):
        s.finished(KVCommit("r", 10, 0, b"h", 1, Timeline()), 0.0)


ranges = st.builds(
    PieceRange,
    st.integers(0, NUM_TOKENS - 1),
    st.integers(1, NUM_TOKENS),
    st.integers(0, NUM_LAYERS - 1),
    st.integers(1, NUM_LAYERS),
).filter(lambda piece: piece.num_tokens > 0 and piece.num_layers > 0)


@given(st.lists(ranges, max_size=40))
@settings(deadline=None)
def test_coverage_against_a_set(pieces: list[PieceRange]) -> None:
    coverage, have = Coverage(NUM_LAYERS), set[tuple[int, int]]()
    for piece in pieces:
        assert coverage.overlaps(piece) == bool(cells(piece) & have)
        if not coverage.overlaps(piece):
            coverage.add(piece)
            have |= cells(piece)
        for start in range(NUM_TOKENS + 1):
            missing = (
                n for n in range(start, NUM_TOKENS + 1) if not cells(PieceRange(n, n + 1, 0, NUM_LAYERS)) <= have
            )
            assert coverage.reach(start) == next(missing)


def test_whole_tokens_are_one_band_again() -> None:
    coverage = Coverage(4)
    for layer in (2, 0, 3, 1):
        coverage.add(PieceRange(0, 5, layer, layer + 1))
    assert len(coverage._bands) == 1


class LayerwiseHandover(RuleBasedStateMachine):
    """A prompt computed layer by layer; pieces of any size arrive in any order, some twice, some invented."""

    def __init__(self) -> None:
        super().__init__()
        self.sender = KVSender("r", NUM_TOKENS, NUM_LAYERS, 0.0, 1e9)
        self.receiver: KVReceiver | None = None
        self.first_missing = 0
        self.there: set[tuple[int, int]] = set()  # computed
        self.chunk: tuple[int, int, int] | None = None  # start, stop, layers done
        self.sent: set[tuple[int, int]] = set()
        self.under_way: list[PieceRange] = []
        self.placed: set[tuple[int, int]] = set()

    @property
    def num_whole(self) -> int:
        return self.sender.num_computed

    @precondition(lambda self: self.receiver is None)
    @rule(first_missing=st.integers(0, NUM_TOKENS))
    def grant(self, first_missing: int) -> None:
        self.first_missing = first_missing
        self.receiver = KVReceiver("r", first_missing, NUM_TOKENS, NUM_LAYERS, 0.0, 1e9)
        self.sender.granted(first_missing, 1, 0.0)

    @precondition(lambda self: self.num_whole < NUM_TOKENS)
    @rule(data=st.data())
    def compute_layers(self, data: st.DataObject) -> None:
        if self.chunk is None:
            self.chunk = (self.num_whole, data.draw(st.integers(self.num_whole + 1, NUM_TOKENS)), 0)
        start, stop, before = self.chunk
        layers = data.draw(st.integers(before, NUM_LAYERS))
        self.sender.computing(stop, layers, 0.0)
        self.chunk = (start, stop, layers)
        self.there |= cells(PieceRange(start, stop, 0, layers))

    @precondition(lambda self: self.num_whole < NUM_TOKENS)
    @rule(data=st.data())
    def complete_chunk(self, data: st.DataObject) -> None:
        stop = self.chunk[1] if self.chunk else data.draw(st.integers(self.num_whole + 1, NUM_TOKENS))
        self.there |= cells(PieceRange(self.num_whole, stop, 0, NUM_LAYERS))
        self.sender.computed(stop, 0.0)
        self.chunk = None

    @rule(max_cells=st.integers(1, 30))
    def send(self, max_cells: int) -> None:
        piece = self.sender.next_range(max_cells)
        wanted = {c for c in self.there if c[0] >= self.first_missing} - self.sent
        assert (piece is None) == (not wanted or self.receiver is None)
        if piece is not None:
            assert 0 < len(cells(piece)) <= max_cells
            assert cells(piece) <= wanted
            self.sent |= cells(piece)
            self.under_way.append(piece)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), keep=st.booleans())
    def arrive(self, data: st.DataObject, keep: bool) -> None:
        piece = data.draw(st.sampled_from(self.under_way))
        if not keep:
            self.under_way.remove(piece)
        self.place(piece)

    @precondition(lambda self: self.receiver is not None)
    @rule(start=st.integers(-1, 13), stop=st.integers(-1, 13), first=st.integers(-1, 6), last=st.integers(-1, 6))
    def invented(self, start: int, stop: int, first: int, last: int) -> None:
        piece = PieceRange(start, stop, first, last)
        makes_sense = self.first_missing <= start < stop <= NUM_TOKENS and 0 <= first < last <= NUM_LAYERS
        if not makes_sense or cells(piece) & self.placed:
            self.refused(piece)

    def place(self, piece: PieceRange) -> None:
        assert self.receiver is not None
        if cells(piece) & self.placed:
            self.refused(piece)
        else:
            self.receiver.placed(piece, 0.0)
            self.placed |= cells(piece)

    def refused(self, piece: PieceRange) -> None:
        assert self.receiver is not None
        for call in (self.receiver.check, lambda p: self.receiver.placed(p, 0.0)):
            with pytest.raises(RemoteProtocolError):
                call(piece)

    @invariant()
    def contiguous_is_what_all_layers_have(self) -> None:
        if self.receiver is None:
            return
        whole = self.first_missing
        while all((whole, layer) in self.placed for layer in range(NUM_LAYERS)):
            whole += 1
        assert self.receiver.contiguous_tokens == whole
        assert (self.receiver.phase is ReceiverPhase.PLACED) == (whole == NUM_TOKENS)


def test_each_token_and_layer_travels_once() -> None:
    run_state_machine_as_test(
        LayerwiseHandover, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
