"""Channels over real sockets: who reaches whom, what is dropped, what is refused."""

import pickle
import socket as plain_socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from baton.core.config import NetworkConfig
from baton.core.errors import ConfigurationError
from baton.core.messages import Envelope, KVAbort, KVPiece, NodeRef, Role, WorkerInfo
from baton.transfer.channels import Incoming, PeerUnreachable, WorkerChannels
from baton.transfer.keys import ClusterKeys
from baton.transfer.wire import encode

A, B, C = NodeRef("prefill-0", 11), NodeRef("decode-0", 22), NodeRef("decode-0", 33)


def info_of(channels: WorkerChannels, ref: NodeRef) -> WorkerInfo:
    return WorkerInfo(
        ref=ref,
        roles=(Role.DECODE,),
        pid=1,
        device="cpu",
        model="m",
        model_digest="d",
        wire_digest="w",
        host_digest=channels.host_digest,
        endpoints=channels.endpoints,
        block_size=16,
        num_blocks=8,
        context_length=64,
        max_running=4,
        threads=1,
    )


def poll_until(channels: WorkerChannels, count: int, bound_s: float = 5.0) -> list[Incoming]:
    received: list[Incoming] = []
    deadline = time.monotonic() + bound_s
    while len(received) < count and time.monotonic() < deadline:
        received += channels.poll(0.05)
    return received


@pytest.fixture
def keys(tmp_path: Path) -> ClusterKeys:
    return ClusterKeys.create(tmp_path / "keys")


Make = Callable[..., WorkerChannels]


@pytest.fixture
def make(tmp_path: Path, keys: ClusterKeys) -> Iterator[Make]:
    made: list[WorkerChannels] = []

    def build(ref: NodeRef, run_dir: str | None = None, join: tuple[str, ...] = ()) -> WorkerChannels:
        network = NetworkConfig(str(tmp_path) if run_dir is None else run_dir, "127.0.0.1", join, "")
        made.append(WorkerChannels(network, ref, keys))
        return made[-1]

    yield build
    for channels in made:
        channels.close()


@pytest.mark.parametrize("shared", [True, False], ids=["ipc", "tcp"])
def test_a_message_and_its_payload_reach_the_peer(make: Make, shared: bool) -> None:
    run_dir = None if shared else ""
    a, b = make(A, run_dir), make(B, run_dir)
    assert (a.host_digest == b.host_digest) is shared
    a.add_peer(info_of(b, B))
    assert a.peer_info(B).ref == B
    piece = KVPiece("r", 1, 2, 3, 0, 4, 0, 1, 0, 1, 5, 2**64 - 1)
    a.send(B, piece, bytearray(range(100)) * 1000)
    a.send(B, KVAbort("r", "why"))
    first, second = poll_until(b, 2)
    assert (first.sender, first.body) == (A, piece)
    assert first.payload is not None
    assert bytes(first.payload) == bytes(range(100)) * 1000
    assert second == Incoming(A, KVAbort("r", "why"), None)
    assert not first.payload.readonly


def test_what_a_worker_said_before_it_left_arrives(make: Make) -> None:
    a, b = make(A, ""), make(B, "")
    a.add_peer(info_of(b, B))
    for n in range(20):
        a.send(B, KVAbort(str(n), "x"), bytearray(1_000_000))
    a.close()
    assert [i.body for i in poll_until(b, 20)] == [KVAbort(str(n), "x") for n in range(20)]


def test_each_life_of_a_process_is_another_receiver(make: Make) -> None:
    a, b = make(A), make(B)
    old = info_of(b, B)
    a.add_peer(WorkerInfo(**{f: getattr(old, f) for f in old.__struct_fields__ if f != "ref"}, ref=C))
    a.send(C, KVAbort("for C", ""))  # reaches B's socket but is meant for another incarnation
    a.add_peer(old)
    a.send(B, KVAbort("for B", ""))
    assert [i.body for i in poll_until(b, 1)] == [KVAbort("for B", "")]
    deadline = time.monotonic() + 5
    while b.num_dropped == 0 and time.monotonic() < deadline:
        b.poll(0.05)
    assert b.num_dropped == 1


def test_unknown_and_removed_peers_are_unreachable(make: Make) -> None:
    a, b = make(A), make(B)
    with pytest.raises(PeerUnreachable, match="decode-0"):
        a.send(B, KVAbort("r", ""))
    a.add_peer(info_of(b, B))
    a.send(B, KVAbort("r", ""))
    assert poll_until(b, 1)
    a.remove_peer(B)
    a.remove_peer(B)
    with pytest.raises(PeerUnreachable):
        a.send(B, KVAbort("r", ""))
    with pytest.raises(PeerUnreachable):
        a.peer_info(B)


def test_a_full_queue_is_an_error_and_nothing_sent_without_one_is_lost(make: Make) -> None:
    """ZQ01: a flood of small messages to a reader that sleeps: those sent without an error all arrive, in order."""
    a, b = make(A), make(B)
    a.add_peer(info_of(b, B))
    sent = 0
    with pytest.raises(PeerUnreachable):  # noqa: PT012
        while sent < 200_000:
            a.send(B, KVAbort(str(sent), ""))
            sent += 1
    assert 16_000 <= sent < 200_000
    received = poll_until(b, sent, 30)
    assert [i.body.request_id for i in received if isinstance(i.body, KVAbort)] == [str(n) for n in range(sent)]


def test_20_000_messages_to_a_slow_reader_with_back_pressure(make: Make) -> None:
    a, b = make(A), make(B)
    a.add_peer(info_of(b, B))
    received: list[Incoming] = []
    for n in range(20_000):
        while True:
            try:
                a.send(B, KVAbort(str(n), ""))
                break
            except PeerUnreachable:
                received += b.poll(0.01)
    received += poll_until(b, 20_000 - len(received), 30)
    assert [int(i.body.request_id) for i in received if isinstance(i.body, KVAbort)] == list(range(20_000))


def test_garbage_on_every_socket_is_dropped_and_the_process_lives(
    make: Make, keys: ClusterKeys, tmp_path: Path
) -> None:
    """ZQ04: a pickle with a marker, random bytes, a raw TCP stream, too many frames: nothing runs, nothing is lost."""
    marker = tmp_path / "owned"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return (open, (str(marker), "w"))

    b = make(B)
    ipc, tcp = b.endpoints
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(ipc)
    good = encode(A, B.incarnation, KVAbort("r", ""))
    garbage = [
        [pickle.dumps(Evil())],
        [b""],
        [b"\x00" * 100],
        [bytes(range(256)) * 40],
        [good, b"x", b"y"],
        [good[:-1]],
        [good + b"\x00"],
        [b"\x93" * 100_000],
    ]
    for frames in garbage:
        dealer.send_multipart(frames)
    dealer.send(good)
    path = ipc.removeprefix("ipc://")
    host, port = tcp.removeprefix("tcp://").split(":")
    with plain_socket.socket(plain_socket.AF_UNIX) as raw:
        raw.connect(path)
        raw.sendall(pickle.dumps(Evil()) * 100)
    with plain_socket.create_connection((host, int(port))) as raw:
        raw.sendall(pickle.dumps(Evil()) * 100)
    assert [i.body for i in poll_until(b, 1)] == [KVAbort("r", "")]
    assert b.num_dropped >= len(garbage)  # libzmq takes some of the raw bytes for old framing
    assert not marker.exists()
    dealer.close()
    context.term()


def test_without_the_key_nothing_goes_in(make: Make, keys: ClusterKeys, tmp_path: Path) -> None:
    """Plain clients and clients with another key pair (who know the server's public key) are refused on TCP."""
    b = make(B, "")
    a = make(A, "")
    (tcp,) = b.endpoints
    context = zmq.Context()
    other = ClusterKeys.create(tmp_path / "others")
    strangers = []
    for pair in (None, other):
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        if pair is not None:
            stranger.curve_serverkey = keys.public.encode()
            stranger.curve_publickey = pair.public.encode()
            stranger.curve_secretkey = pair.secret.encode()
        monitor = stranger.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
        )
        stranger.connect(tcp)
        stranger.send(encode(A, B.incarnation, KVAbort("stranger", "")))
        assert monitor.poll(5000), "the connection was not refused"
        stranger.disable_monitor()
        monitor.close()
        strangers.append(stranger)
    a.add_peer(info_of(b, B))
    a.send(B, KVAbort("member", ""))
    assert [i.body for i in poll_until(b, 1)] == [KVAbort("member", "")]
    assert b.poll(0.1) == []
    for stranger in strangers:
        stranger.close()
    context.term()


def test_an_envelope_names_both_incarnations() -> None:
    import msgspec

    envelope = msgspec.msgpack.decode(encode(A, 5, KVAbort("r", "")), type=Envelope)
    assert envelope == Envelope(A, 5, KVAbort("r", ""))


def test_a_run_directory_that_is_too_deep_is_named(keys: ClusterKeys, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ConfigurationError, match="shorter run directory"):
        WorkerChannels(NetworkConfig(str(deep), "127.0.0.1", (), ""), A, keys)


def test_an_address_that_cannot_be_bound_is_named(keys: ClusterKeys, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1"):
        WorkerChannels(NetworkConfig("", "192.0.2.1", (), ""), A, keys)
