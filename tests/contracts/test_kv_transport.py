"""The contract of a KV transport.

The same for shared memory, TCP (real sockets, CURVE), a gloo group, NCCL (its code path, over gloo), CUDA IPC and
pinned memory (with a fake driver) and the fake network.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.core.errors import RequestError
from baton.core.messages import KVAbort, KVCommit, KVCredit, KVPiece, Message, NodeRef, RingOffer
from baton.core.timeline import Station, Timeline
from baton.transfer.channels import Incoming
from baton.transfer.link import HandedOver, ReceiveFailed, SendDone, SendFailed

HIDDEN = np.arange(8, dtype=np.float32).tobytes()


@pytest.fixture(params=["shared_memory", "tcp", "gloo", "nccl", "cuda_ipc", "pinned_memory", "fake"])
def cluster(
    request: pytest.FixtureRequest, fakes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    device = fakes.FakeCudaDevice()
    monkeypatch.setattr("baton.transfer.rings.cuda_device", lambda: device)
    if request.param == "nccl":
        fakes.fake_nccl(monkeypatch)
    made = fakes.Cluster(request.param, tmp_path)
    made.device = device
    yield made
    made.close()
    gc.collect()
    assert not list(made.run_dir.glob("*.ring"))
    assert not device.mapped
    assert not device.pinned


def table(num_tokens: int, block_size: int, first: int) -> list[int]:
    """Blocks for `num_tokens` tokens, descending, so that neighbours in the prompt are not neighbours in the pool."""
    num_blocks = -(-num_tokens // block_size)
    return list(range(first + num_blocks - 1, first - 1, -1))


def start(cluster: Any, request_id: str, p: Any, d: Any, kv: np.ndarray, first_missing: int = 0) -> tuple[list, list]:
    """A prompt whose KV lies complete in P's pool, opened on both sides; D holds the first tokens already."""
    num_tokens = kv.shape[3]
    p_table, d_table = table(num_tokens, p.store.block_size, 1), table(num_tokens, d.store.block_size, 2)
    p.store.write(p_table, 0, kv)
    d.store.write(d_table, 0, kv[:, :, :, :first_missing])
    p.link.open_sender(request_id, d.ref, p_table, num_tokens, cluster.clock.now)
    d.link.open_receiver(request_id, p.ref, d_table, first_missing, num_tokens, cluster.clock.now)
    return p_table, d_table


def finish(cluster: Any, request_id: str, p: Any, num_tokens: int, timeline: Timeline | None = None) -> None:
    p.link.computed(request_id, num_tokens, cluster.clock.now)
    p.link.finish(request_id, HIDDEN, 5, timeline or Timeline(), cluster.clock.now)


def expected_pool(fakes: ModuleType, d: Any, d_table: list[int], kv: np.ndarray) -> np.ndarray:
    fresh = fakes.NumpyStore(d.store.block_size, len(d.store.pool))
    fresh.write(d_table, 0, kv)
    return fresh.pool


@pytest.mark.parametrize(
    ("p_block", "d_block", "first_missing"),
    [(4, 4, 0), (4, 4, 5), (1, 16, 1), (1, 16, 36), (16, 1, 0), (16, 1, 5), (64, 8, 36), (2, 64, 1), (2, 64, 37)],
)
def test_every_byte_arrives_and_no_other_is_touched(
    cluster: Any, fakes: ModuleType, p_block: int, d_block: int, first_missing: int
) -> None:
    p, d = cluster.add("prefill-0", p_block), cluster.add("decode-0", d_block)
    kv = fakes.kv_of(1, 37)
    _, d_table = start(cluster, "r", p, d, kv, first_missing)
    cluster.turn()
    timeline = Timeline({Station.PREFILL_COMPUTED: 7})
    for computed in (0, 3, 11, 30, 37):
        p.link.computed("r", computed, cluster.clock.now)
        cluster.turn()
    finish(cluster, "r", p, 37, timeline)
    cluster.settle()
    assert p.take_events() == [SendDone("r")]
    ((request_id, commit, merged),) = d.take_events()
    assert request_id == "r"
    assert (commit.num_tokens, commit.num_cached_tokens, commit.hidden) == (37, 5, HIDDEN)
    assert merged.stamps[Station.PREFILL_COMPUTED] == 7
    assert Station.HANDED_OVER in merged.stamps
    assert merged.message_ns > 0
    assert (merged.copy_ns > 0) is (first_missing < 37)
    np.testing.assert_array_equal(d.store.pool, expected_pool(fakes, d, d_table, kv))
    num_bytes = (37 - first_missing) * fakes.BYTES_PER_TOKEN
    assert (p.link.counts().bytes_sent, d.link.counts().bytes_received) == (num_bytes, num_bytes)
    assert d.link.counts().messages_refused == p.link.counts().messages_refused == 0
    assert d.link.transport_of(p.ref) == {"fake": "tcp"}.get(cluster.transport, cluster.transport)


@pytest.mark.parametrize("slot_tokens", [0.4, 1, 3, 50])
def test_layers_leave_while_others_are_computed(cluster: Any, fakes: ModuleType, slot_tokens: float) -> None:
    """Only layers that are said to be done are read; what is not yet computed lies poisoned in P's pool."""
    p, d = cluster.add("prefill-0", 8), cluster.add("decode-0", 4, slot_tokens=slot_tokens)
    kv = fakes.kv_of(1, 37)
    p_table, d_table = start(cluster, "r", p, d, kv, first_missing=3)
    p.store.pool[:] = fakes.POISON
    for begin, stop in ((0, 20), (20, 37)):
        for layer in range(fakes.NUM_LAYERS):
            for n in range(begin, stop):
                p.store.pool[p_table[n // 8], layer, :, :, n % 8] = kv[layer, :, :, n]
            p.link.computing("r", stop, layer + 1, cluster.clock.now)
            sent = (max(begin - 3, 0) * fakes.NUM_LAYERS + (stop - max(begin, 3)) * (layer + 1)) * bytes_per_cell(fakes)
            cluster.run_until(lambda sent=sent: d.link.counts().bytes_received == sent)
        assert d.link._receiving._incoming["r"].session.contiguous_tokens == stop
        p.link.computed("r", stop, cluster.clock.now)
    finish(cluster, "r", p, 37)
    cluster.settle()
    assert isinstance(d.take_events()[0], HandedOver)
    np.testing.assert_array_equal(d.store.pool, expected_pool(fakes, d, d_table, kv))
    assert p.link.counts().bytes_sent == 34 * fakes.BYTES_PER_TOKEN


def test_a_failure_while_layers_arrive_counts_whole_tokens_only(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    start(cluster, "r", p, d, fakes.kv_of(1, 37))
    p.link.computed("r", 10, cluster.clock.now)
    p.link.computing("r", 30, fakes.NUM_LAYERS - 1, cluster.clock.now)
    arrived = (10 * fakes.NUM_LAYERS + 20 * (fakes.NUM_LAYERS - 1)) * bytes_per_cell(fakes)
    cluster.run_until(lambda: d.link.counts().bytes_received == arrived)
    p.link.abort("r", "enough")
    cluster.run_until(lambda: bool(d.events))
    assert d.take_events() == [ReceiveFailed("r", "prefill-0 gave it up: enough", 10)]


def bytes_per_cell(fakes: ModuleType) -> int:
    return fakes.BYTES_PER_TOKEN // fakes.NUM_LAYERS


def test_the_commit_alone_when_nothing_is_missing_before_the_prompt_is_even_queued(
    cluster: Any, fakes: ModuleType
) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    d.link.open_receiver("r", p.ref, [3], 4, 4, cluster.clock.now)
    for _ in range(20):
        cluster.turn()  # the grant arrives before P knows of the request
    p.link.open_sender("r", d.ref, [5], 4, cluster.clock.now)
    finish(cluster, "r", p, 4)
    cluster.settle()
    assert isinstance(d.take_events()[0], HandedOver)
    assert p.link.counts().bytes_sent == 0


class Silent:
    """Channels on which nothing arrives."""

    def poll(self, timeout_s: float) -> list[Incoming]:
        return []


def test_a_receiver_that_does_not_read_stops_the_sender_at_its_credits(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0", slots=2, slot_tokens=3)
    kv = fakes.kv_of(2, 50)
    _, d_table = start(cluster, "r", p, d, kv)
    finish(cluster, "r", p, 50)

    d.channels, d_channels = Silent(), d.channels  # D's loop goes round, but it takes nothing in
    cluster.run_until(lambda: p.link.counts().ring_slots_in_use == 2)
    for _ in range(5):
        cluster.turn()
    assert p.link.counts().ring_slots_in_use == 2
    assert p.link.counts().bytes_sent == 2 * 3 * fakes.BYTES_PER_TOKEN
    assert p.take_events() == []
    d.channels = d_channels
    cluster.settle()
    np.testing.assert_array_equal(d.store.pool, expected_pool(fakes, d, d_table, kv))


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_abort_mid_way_then_the_same_blocks_for_another_request(cluster: Any, fakes: ModuleType, who: str) -> None:
    """PD09: late pieces of the aborted request must not reach the blocks their next owner has on either side."""
    p, d = cluster.add("prefill-0"), cluster.add("decode-0", slots=3, slot_tokens=2)
    old, new = fakes.kv_of(3, 41), fakes.kv_of(4, 29)
    start(cluster, "old", p, d, old)
    p.link.computed("old", 41, cluster.clock.now)
    cluster.run_until(lambda: d.link.counts().bytes_received > 0)
    aborting, other = (p, d) if who == "prefill" else (d, p)
    aborting.link.abort("old", "the client left")
    if who == "decode":  # P has not heard of it yet and goes on; D hands the blocks out at once
        d.store.pool[:] = fakes.POISON
        d_table = table(29, d.store.block_size, 2)
        d.link.open_receiver("new", p.ref, d_table, 0, 29, cluster.clock.now)
        cluster.run_until(lambda: p.link.counts().senders == 0)
        p_table = table(29, p.store.block_size, 1)
        p.store.write(p_table, 0, new)
        p.link.open_sender("new", d.ref, p_table, 29, cluster.clock.now)
    else:
        p_table = table(29, p.store.block_size, 1)
        p.store.write(p_table, 0, new)
        p.link.open_sender("new", d.ref, p_table, 29, cluster.clock.now)
        cluster.run_until(lambda: d.link.counts().receivers == 0)
        d.store.pool[:] = fakes.POISON
        d_table = table(29, d.store.block_size, 2)
        d.link.open_receiver("new", p.ref, d_table, 0, 29, cluster.clock.now)
    finish(cluster, "new", p, 29)
    cluster.settle()
    np.testing.assert_array_equal(d.store.pool, expected_pool(fakes, d, d_table, new))
    failed = [e for e in other.take_events() if isinstance(e, SendFailed | ReceiveFailed)]
    assert [e.request_id for e in failed] == ["old"]
    assert "the client left" in failed[0].reason
    assert not [e for e in aborting.take_events() if e.request_id == "old"]


def test_abort_before_the_other_side_has_opened(cluster: Any) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    p.link.open_sender("r", d.ref, [1], 4, cluster.clock.now)
    p.link.abort("r", "too long")
    for _ in range(20):
        cluster.turn()
    d.link.open_receiver("r", p.ref, [1], 0, 4, cluster.clock.now)
    cluster.settle()
    assert d.take_events() == [ReceiveFailed("r", "prefill-0 gave it up: too long", 0)]


def test_many_requests_at_once_keep_apart(cluster: Any, fakes: ModuleType) -> None:
    """PD08: one small ring shared by many prompts of two senders."""
    p, q, d = cluster.add("prefill-0", 8, 128), cluster.add("prefill-1", 2, 128), cluster.add("decode-0", 4, 256)
    tables = {}
    for n in range(16):
        sender, kv = (p, q)[n % 2], fakes.kv_of(n, 17 + n)
        first = 1 + n * (40 // sender.store.block_size)
        p_table = list(range(first, first + -(-(17 + n) // sender.store.block_size)))
        p_table = [block % len(sender.store.pool) for block in p_table]
        tables[n] = (p_table, list(range(n * 10, n * 10 + 9)))
    for n in range(16):
        sender, kv = (p, q)[n % 2], fakes.kv_of(n, 17 + n)
        p_table = table(17 + n, sender.store.block_size, 0)
        own = fakes.NumpyStore(sender.store.block_size, 64)
        own.write(p_table, 0, kv)
        sender.store.write(p_table, 0, kv)
        sender.link.open_sender(f"r{n}", d.ref, p_table, 17 + n, cluster.clock.now)
        d.link.open_receiver(f"r{n}", sender.ref, tables[n][1], 0, 17 + n, cluster.clock.now)
        finish(cluster, f"r{n}", sender, 17 + n)
        cluster.run_until(lambda n=n, s=sender: SendDone(f"r{n}") in s.events)  # its blocks are the next prompt's now
    cluster.settle()
    for n in range(16):
        np.testing.assert_array_equal(d.store.read(tables[n][1], 0, 17 + n), fakes.kv_of(n, 17 + n))
    assert sum(isinstance(e, HandedOver) for e in d.take_events()) == 16


class Tampering:
    """Stands before P's channels and changes the first piece after its checksum was taken."""

    def __init__(self, cluster: Any, inner: Any, link: Any, what: str) -> None:
        self._cluster, self._inner, self._link, self._what = cluster, inner, link, what

    def _staging(self, to: NodeRef) -> Any:
        return self._link._sending._rings[to].backend._slots

    def peer_info(self, ref: NodeRef) -> Any:
        return self._inner.peer_info(ref)

    def send(self, to: NodeRef, body: Message, payload: bytearray | None = None) -> None:
        match body:
            case KVPiece() if self._what == "byte" and body.start == 6:
                if payload is not None:
                    payload[17] ^= 1
                elif self._cluster.transport == "cuda_ipc":
                    (memory,) = self._cluster.device.allocated.values()
                    memory[body.slot * 768 + 17] ^= 1  # slots begin at multiples of 256
                elif self._cluster.transport in ("gloo", "nccl"):
                    self._staging(to)[body.slot * 768 + 17] ^= 1
                else:
                    (path,) = self._cluster.run_dir.glob("*.ring")
                    with open(path, "r+b") as ring:
                        ring.seek(body.slot * self._cluster.slot_bytes + 17)
                        byte = ring.read(1)[0]
                        ring.seek(-1, 1)
                        ring.write(bytes([byte ^ 1]))
            case KVPiece() if self._what in ("last_layer", "first_head", "num_bytes", "stop", "start"):
                body = msgspec.structs.replace(body, **{self._what: getattr(body, self._what) + 1})
            case KVCommit() if self._what == "hidden":
                body = msgspec.structs.replace(body, hidden=body.hidden[:-1] + b"\xff")
            case KVCommit() if self._what == "num_tokens":
                body = msgspec.structs.replace(body, num_tokens=body.num_tokens + 1)
        self._inner.send(to, body, payload)


@pytest.mark.parametrize(
    "what", ["byte", "hidden", "num_tokens", "last_layer", "first_head", "num_bytes", "stop", "start"]
)
def test_whatever_is_wrong_fails_the_hand_over_and_only_that(cluster: Any, fakes: ModuleType, what: str) -> None:
    p, d = cluster.add("prefill-0", slots=8), cluster.add("decode-0", slots=8)
    cluster.slot_bytes = 3 * fakes.BYTES_PER_TOKEN + 5
    surroundings = p.link._sending._around
    object.__setattr__(surroundings, "channels", Tampering(cluster, p.channels, p.link, what))
    kv = fakes.kv_of(5, 20)
    _, d_table = start(cluster, "r", p, d, kv, first_missing=3)
    finish(cluster, "r", p, 20)
    cluster.settle()
    (failed,) = d.take_events()
    assert isinstance(failed, ReceiveFailed)
    good_until = {"byte": 6, "hidden": 20, "num_tokens": 20}.get(what, 3)
    if cluster.transport in ("gloo", "nccl"):  # messages may overtake the bytes of the pieces
        assert 3 <= failed.contiguous_tokens <= good_until
        good_until = failed.contiguous_tokens
    assert failed.contiguous_tokens == good_until
    np.testing.assert_array_equal(d.store.read(d_table, 0, good_until), kv[:, :, :, :good_until])
    # nothing of what was wrong is in the pool; good pieces may follow the bad one only while D had not yet given up
    fresh = expected_pool(fakes, d, d_table, kv)
    assert np.all((d.store.pool == fakes.POISON) | (d.store.pool == fresh))
    object.__setattr__(surroundings, "channels", p.channels)
    again = fakes.kv_of(6, 20)
    d.store.pool[:] = fakes.POISON
    p.take_events()
    _, d_table = start(cluster, "next", p, d, again)
    finish(cluster, "next", p, 20)
    cluster.settle()
    np.testing.assert_array_equal(d.store.pool, expected_pool(fakes, d, d_table, again))


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_dead_peer_fails_its_hand_overs_and_frees_its_ring(cluster: Any, fakes: ModuleType, who: str) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0", slots=2)
    kv = fakes.kv_of(7, 50)
    start(cluster, "r", p, d, kv)
    p.link.open_sender("not granted", d.ref, [1], 4, cluster.clock.now)
    p.link.computed("r", 30, cluster.clock.now)
    cluster.run_until(lambda: d.link.counts().bytes_received >= 6 * fakes.BYTES_PER_TOKEN)
    dead, left = (p, d) if who == "prefill" else (d, p)
    cluster.remove(dead)
    events = left.events + left.link.drop_peer(dead.ref)
    left.channels.remove_peer(dead.ref)
    assert [e.request_id for e in events] == (["r"] if who == "prefill" else ["r", "not granted"])
    event = events[0]
    assert all("is gone" in e.reason for e in events)
    if isinstance(event, ReceiveFailed):
        assert event.contiguous_tokens >= 6
    assert left.link.counts()[:3] == (0, 0, 0)
    left.events.clear()
    # a new life under the same name starts from nothing
    again = cluster.add(dead.ref.node_id)
    p, d = (again, left) if who == "prefill" else (left, again)
    d.store.pool[:] = fakes.POISON
    _, d_table = start(cluster, "r", p, d, kv)
    finish(cluster, "r", p, 50)
    cluster.settle()
    np.testing.assert_array_equal(d.store.pool, expected_pool(fakes, d, d_table, kv))


def test_late_pieces_of_an_old_life_and_stale_generations_are_refused(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    seen: list[Incoming] = []
    handle = d.link.handle

    def spy(incoming: Incoming, now: float) -> Any:
        seen.append(incoming)
        return handle(incoming, now)

    d.link.handle = spy
    kv = fakes.kv_of(8, 9)
    start(cluster, "r", p, d, kv)
    finish(cluster, "r", p, 9)
    cluster.settle()
    pieces = [i for i in seen if isinstance(i.body, KVPiece)]
    before = d.store.pool.copy()
    d.link.open_receiver("r", p.ref, [60, 61, 62], 0, 9, cluster.clock.now)  # would take any piece of "r"
    for piece in pieces:
        d.link.handle(piece, cluster.clock.now)  # its generation has passed
    old_life = [Incoming(NodeRef("prefill-0", 1), i.body, i.payload) for i in pieces]
    for piece in old_life:
        d.link.handle(piece, cluster.clock.now)
    assert d.link.counts().messages_refused == 2 * len(pieces)
    np.testing.assert_array_equal(d.store.pool, before)
    d.link.abort("r", "end of test")
    cluster.settle()
    refused = p.link.counts().messages_refused
    for sender in (d.ref, NodeRef("decode-0", 1)):
        p.link.handle(Incoming(sender, KVCredit(pieces[0].body.ring_id, 0, 1)), cluster.clock.now)
    assert p.link.counts().messages_refused == refused + 2


def test_messages_about_another_peers_request_change_nothing(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    stranger = cluster.add("prefill-1")
    kv = fakes.kv_of(9, 9)
    _, d_table = start(cluster, "r", p, d, kv)
    for node in (p, d):
        node.events += node.link.handle(Incoming(stranger.ref, KVAbort("r", "no")), cluster.clock.now)
    commit = KVCommit("r", 9, 0, HIDDEN, 0, Timeline())
    d.events += d.link.handle(Incoming(stranger.ref, commit), cluster.clock.now)
    finish(cluster, "r", p, 9)
    cluster.settle()
    assert [type(e) for e in p.events + d.events] == [SendDone, HandedOver]
    np.testing.assert_array_equal(d.store.pool, expected_pool(fakes, d, d_table, kv))


def test_a_peer_cannot_place_pieces_into_another_peers_request(cluster: Any, fakes: ModuleType) -> None:
    """Its own ring is in order, only the request is not its own: the piece is discarded and the slot goes back."""
    p, q, d = cluster.add("prefill-0"), cluster.add("prefill-1"), cluster.add("decode-0")
    kv = fakes.kv_of(12, 9)
    d.link.open_receiver("r", p.ref, [30, 31, 32], 0, 9, cluster.clock.now)
    start(cluster, "s", q, d, kv)
    q.link._sending._outgoing["s"].session.request_id = "r"  # q lies
    q.link.computed("s", 9, cluster.clock.now)
    cluster.run_until(lambda: q.link.counts().bytes_sent > 0 and q.link.counts().ring_slots_in_use == 0)
    assert d.events == []
    assert d.link.counts().receivers == 2
    assert np.all(d.store.pool == fakes.POISON)


def test_a_new_ring_replaces_the_old_one_and_what_used_it(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    start(cluster, "r", p, d, fakes.kv_of(13, 9))
    cluster.run_until(
        lambda: bool(p.link._sending._rings) and p.link._sending._outgoing["r"].session.ring_id is not None
    )
    p.events += p.link.handle(Incoming(d.ref, RingOffer(5, "tcp", "", 4, 10_000)), cluster.clock.now)
    assert p.events == [SendFailed("r", "decode-0 replaced its ring")]
    cluster.settle()
    assert [type(e) for e in d.events] == [ReceiveFailed]


def test_a_silent_sender_costs_the_lease_and_a_living_one_does_not(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0", lease_s=8.0), cluster.add("decode-0", lease_s=8.0)
    start(cluster, "r", p, d, fakes.kv_of(10, 9))
    for _ in range(6):  # 36 s in all: P computes nothing yet but says that it lives
        cluster.clock.now += 6.0
        for _ in range(20):
            cluster.turn()
    assert d.take_events() == []
    cluster.clock.now += 8.5
    d.events += d.link.pump(cluster.clock.now)
    (failed,) = d.take_events()
    assert isinstance(failed, ReceiveFailed)
    assert "silent" in failed.reason
    cluster.settle()
    assert [type(e) for e in p.take_events()] == [SendFailed]


def test_prefill_waits_for_a_grant_only_so_long(cluster: Any) -> None:
    p, d = cluster.add("prefill-0", lease_s=8.0), cluster.add("decode-0")
    p.link.open_sender("r", d.ref, [1], 4, cluster.clock.now)
    cluster.clock.now += 100.0  # still in P's own queue: no fault of D
    assert p.link.pump(cluster.clock.now) == []
    finish(cluster, "r", p, 4)
    cluster.clock.now += 7.9
    assert p.link.pump(cluster.clock.now) == []
    cluster.clock.now += 0.2
    (failed,) = p.link.pump(cluster.clock.now)
    assert isinstance(failed, SendFailed)


def test_an_unreachable_peer_is_an_event_and_not_an_exception(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    nobody = NodeRef("decode-9", 9)
    d.link.open_receiver("r", nobody, [1], 0, 4, cluster.clock.now)
    (failed,) = d.link.pump(cluster.clock.now)
    assert isinstance(failed, ReceiveFailed)
    start(cluster, "s", p, d, fakes.kv_of(1, 40))
    cluster.run_until(lambda: bool(p.link._sending._rings))
    p.channels.remove_peer(d.ref)
    p.link.computed("s", 40, cluster.clock.now)
    p.link.finish("s", HIDDEN, 0, Timeline(), cluster.clock.now)
    assert [type(e) for e in p.link.pump(cluster.clock.now)] == [SendFailed]
    assert p.link.counts()[:3] == (0, 0, 0)


def test_an_id_that_is_open_is_refused_and_the_open_one_goes_on(cluster: Any, fakes: ModuleType) -> None:
    """PD10."""
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    kv = fakes.kv_of(11, 9)
    _, d_table = start(cluster, "r", p, d, kv)
    with pytest.raises(RequestError, match="unique"):
        p.link.open_sender("r", d.ref, [9], 4, cluster.clock.now)
    with pytest.raises(RequestError, match="unique"):
        d.link.open_receiver("r", p.ref, [9], 0, 4, cluster.clock.now)
    finish(cluster, "r", p, 9)
    cluster.settle()
    np.testing.assert_array_equal(d.store.pool, expected_pool(fakes, d, d_table, kv))
