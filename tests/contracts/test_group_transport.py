"""What only a process group can do wrong: peers that die, stop or never come, and threads that stay behind."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.core.config import NetworkConfig, TransferConfig
from baton.core.messages import GroupKey, KVPiece, NodeRef, WorkerInfo
from baton.core.timeline import Timeline
from baton.transfer.channels import Incoming, WorkerChannels
from baton.transfer.keys import ClusterKeys
from baton.transfer.link import HandedOver, ReceiveFailed, SendDone, SendFailed

HIDDEN = b"hidden"


@pytest.fixture(params=["gloo", "nccl"])
def cluster(
    request: pytest.FixtureRequest, fakes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """NCCL: its code path, over gloo."""
    if request.param == "nccl":
        fakes.fake_nccl(monkeypatch)
    made = fakes.Cluster(request.param, tmp_path)
    yield made
    made.close()


def hand_over(cluster: Any, fakes: ModuleType, p: Any, d: Any, request_id: str = "r") -> None:
    kv = fakes.kv_of(1, 20)
    p.store.write([1, 2, 3, 4, 5], 0, kv)
    p.link.open_sender(request_id, d.ref, [1, 2, 3, 4, 5], 20, cluster.clock.now)
    d.link.open_receiver(request_id, p.ref, [6, 7, 8, 9, 10], 0, 20, cluster.clock.now)
    p.link.computed(request_id, 20, cluster.clock.now)
    p.link.finish(request_id, HIDDEN, 0, Timeline(), cluster.clock.now)


def withhold(p: Any, d: Any) -> None:
    """P goes on announcing pieces but sends no bytes any more."""
    p.link._sending._rings[d.ref].backend.published = lambda slot, num_bytes: None


def test_the_ring_memory_is_counted(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0", slots=4, slot_tokens=3), cluster.add("decode-0", slots=2, slot_tokens=3)
    hand_over(cluster, fakes, p, d)
    cluster.settle()
    slot_bytes = -(-(3 * fakes.BYTES_PER_TOKEN + 5) // 256) * 256
    for node in (p, d):
        for_the_group = node.link.counts().staging_bytes - 2 * slot_bytes
        assert for_the_group > 0 if cluster.transport == "nccl" else for_the_group == 0
    d.link.drop_peer(p.ref)
    assert d.link.counts().staging_bytes == 0


def test_announced_bytes_that_never_come_end_the_group_at_the_deadline(cluster: Any, fakes: ModuleType) -> None:
    """Until the next hand-over, which goes over TCP; the one under way fails with what has arrived."""
    p, d = cluster.add("prefill-0", lease_s=1.5), cluster.add("decode-0", lease_s=1.5)
    hand_over(cluster, fakes, p, d, "first")
    cluster.settle()
    withhold(p, d)
    hand_over(cluster, fakes, p, d)
    began = time.monotonic()
    cluster.run_until(lambda: len(d.events) == 2)
    assert 0.3 < time.monotonic() - began < 5.0
    assert isinstance(d.events[0], HandedOver)
    assert isinstance(d.events[1], ReceiveFailed)
    assert d.events[1].contiguous_tokens == 0
    cluster.settle()
    assert [type(e) for e in p.take_events()][:1] == [SendDone]
    assert d.link.transport_of(p.ref) == "tcp"
    d.take_events()
    hand_over(cluster, fakes, p, d, "next")
    cluster.settle()
    assert [type(e) for e in d.take_events()] == [HandedOver]
    np.testing.assert_array_equal(d.store.read([6, 7, 8, 9, 10], 0, 20), fakes.kv_of(1, 20))


def test_bytes_out_of_step_with_their_announcements_end_the_group(cluster: Any, fakes: ModuleType) -> None:
    """One announcement is lost: every later piece would be taken for the one before it."""
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    hand_over(cluster, fakes, p, d)
    cluster.settle()
    assert isinstance(d.take_events()[0], HandedOver)
    p.store.pool += 1.0
    send, lost = p.channels.send, []

    def losing_the_first_piece(to: NodeRef, body: Any, payload: bytearray | None = None) -> None:
        if isinstance(body, KVPiece) and not lost:
            lost.append(body)
        else:
            send(to, body, payload)

    p.channels.send = losing_the_first_piece
    hand_over(cluster, fakes, p, d, "second")
    cluster.run_until(lambda: bool(d.events))
    (failed,) = d.take_events()
    assert isinstance(failed, ReceiveFailed)
    assert failed.contiguous_tokens == 0
    cluster.settle()
    hand_over(cluster, fakes, p, d, "third")
    cluster.settle()
    assert isinstance(d.take_events()[0], HandedOver)
    assert d.link.transport_of(p.ref) == "tcp"


def test_a_group_that_never_forms_is_given_up(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0", lease_s=1.0), cluster.add("decode-0", lease_s=1.0)
    p.turn = lambda timeout_s=0.0: None  # it hangs
    hand_over(cluster, fakes, p, d)
    cluster.run_until(lambda: bool(d.events))
    assert [type(e) for e in d.take_events()] == [ReceiveFailed]
    del p.turn
    cluster.settle()
    assert [type(e) for e in p.take_events()] == [SendFailed]
    hand_over(cluster, fakes, p, d, "next")
    cluster.settle()
    assert [type(e) for e in d.take_events()] == [HandedOver]
    assert d.link.transport_of(p.ref) == "tcp"


@pytest.mark.parametrize("when", ["forming", "receiving", "idle"])
def test_closing_does_not_wait_for_a_deadline(fakes: ModuleType, tmp_path: Path, when: str) -> None:
    cluster = fakes.Cluster("gloo", tmp_path)
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")  # deadlines of 10 s and more
    if when == "forming":
        d.link.open_receiver("r", p.ref, [1], 0, 4, cluster.clock.now)
        d.turn()
    else:
        hand_over(cluster, fakes, p, d)
        cluster.settle()
    if when == "receiving":
        withhold(p, d)
        hand_over(cluster, fakes, p, d, "next")
        cluster.run_until(lambda: d.link._receiving._rings[p.ref].backend._num_asked > 7)
    began = time.monotonic()
    cluster.close()
    assert time.monotonic() - began < 3.0
    assert not [t.name for t in threading.enumerate() if "gloo" in t.name]


def test_nothing_stays_behind(fakes: ModuleType, tmp_path: Path) -> None:
    def there() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def a_round(number: int) -> None:
        (tmp_path / str(number)).mkdir()
        cluster = fakes.Cluster("gloo", tmp_path / str(number))
        p, d = cluster.add("prefill-0"), cluster.add("decode-0")
        hand_over(cluster, fakes, p, d)
        cluster.settle()
        cluster.close()

    a_round(0)  # libraries start threads of their own the first time
    files, threads = there()
    for number in range(1, 6):
        a_round(number)
    deadline = time.monotonic() + 5.0  # a thread that has ended stays listed for a moment
    while there()[0] > files or there()[1] > threads:
        assert time.monotonic() < deadline, f"{there()} files and threads after {files} and {threads}"


def test_store_entries_are_bounded_and_belong_to_a_group(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    hand_over(cluster, fakes, p, d)
    cluster.settle()
    (ring,) = d.link._receiving._rings.values()
    for n in range(300):
        d.link.handle(Incoming(p.ref, GroupKey(ring.ring_id, f"key {n}", b"x")), cluster.clock.now)
    assert 0 < d.link.counts().messages_refused <= 50
    refused = d.link.counts().messages_refused
    for sender, ring_id in ((NodeRef("prefill-9", 1), ring.ring_id), (p.ref, 1)):
        d.link.handle(Incoming(sender, GroupKey(ring_id, "k", b"x")), cluster.clock.now)
    assert d.link.counts().messages_refused == refused + 2
    hand_over(cluster, fakes, p, d, "next")
    cluster.settle()
    assert [type(e) for e in d.take_events()] == [HandedOver, HandedOver]


# ---- a real peer process -------------------------------------------------------------------------------------------


def run_peer(folder: str, parent: bytes) -> None:
    """The sending worker: says who it is, then hands prompt after prompt over; bytes are withheld when told so."""
    spec = importlib.util.spec_from_file_location("link_fakes", Path(__file__).parents[1] / "transfer/link_fakes.py")
    assert spec is not None
    assert spec.loader is not None
    fakes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fakes)
    node, d = make_node(fakes, Path(folder), "prefill-0"), msgspec.msgpack.decode(parent, type=WorkerInfo)
    node.channels.add_peer(d)
    print(msgspec.msgpack.encode(node.info).hex(), flush=True)
    commands: list[str] = []

    def read_commands() -> None:
        for line in iter(sys.stdin.readline, ""):
            commands.append(line.strip())
            node.channels.wake()
        os._exit(0)  # the test is over

    threading.Thread(target=read_commands, daemon=True).start()
    while True:
        node.clock.now = time.monotonic()
        node.turn(0.05)
        while commands:
            command = commands.pop(0)
            if command == "withhold":
                (ring,) = node.link._sending._rings.values()
                ring.backend.published = lambda slot, num_bytes: None
            else:
                node.store.write([1, 2, 3, 4, 5], 0, fakes.kv_of(1, 20))
                node.link.open_sender(command, d.ref, [1, 2, 3, 4, 5], 20, node.clock.now)
                node.link.computed(command, 20, node.clock.now)
                node.link.finish(command, HIDDEN, 0, Timeline(), node.clock.now)


def make_node(fakes: ModuleType, folder: Path, name: str) -> Any:
    ref = NodeRef(name, int.from_bytes(os.urandom(7)) + 1)
    channels = WorkerChannels(NetworkConfig("", "127.0.0.1", (), ""), ref, ClusterKeys.load(str(folder / "keys")))
    info = fakes.info_of(ref, channels.host_digest, channels.endpoints)
    config = TransferConfig("gloo", 4, 3 * fakes.BYTES_PER_TOKEN, 3.0)
    clock = fakes.Clock()
    clock.now = time.monotonic()
    return fakes.Node(channels, info, fakes.NumpyStore(4, 64), config, "", clock)


class Peer:
    """The other process and the receiving worker here."""

    def __init__(self, fakes: ModuleType, folder: Path) -> None:
        ClusterKeys.create(folder / "keys")
        self.d = make_node(fakes, folder, "decode-0")
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(folder), msgspec.msgpack.encode(self.d.info).hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.info = msgspec.msgpack.decode(bytes.fromhex(self.process.stdout.readline()), type=WorkerInfo)
        self.d.channels.add_peer(self.info)

    def say(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def receive(self, request_id: str) -> None:
        self.d.clock.now = time.monotonic()
        self.d.link.open_receiver(request_id, self.info.ref, [6, 7, 8, 9, 10], 0, 20, self.d.clock.now)
        self.say(request_id)

    def run_until(self, condition: Callable[[], bool], bound_s: float = 15.0) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < bound_s, "the condition did not come true"
            self.d.clock.now = time.monotonic()
            self.d.turn(0.05)
        return time.monotonic() - began

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.d.close()


@pytest.fixture
def peer(fakes: ModuleType, tmp_path: Path) -> Iterator[Peer]:
    made = Peer(fakes, tmp_path)
    yield made
    made.close()


@pytest.mark.slow
def test_a_killed_peer_is_noticed_at_once_by_who_waits_for_its_bytes(peer: Peer, fakes: ModuleType) -> None:
    d = peer.d
    peer.receive("first")
    peer.run_until(lambda: bool(d.events))
    assert [type(e) for e in d.take_events()] == [HandedOver]
    np.testing.assert_array_equal(d.store.read([6, 7, 8, 9, 10], 0, 20), fakes.kv_of(1, 20))
    peer.say("withhold")
    peer.receive("second")
    (ring,) = d.link._receiving._rings.values()
    peer.run_until(lambda: bool(ring.announced))
    os.kill(peer.process.pid, signal.SIGKILL)
    assert peer.run_until(lambda: bool(d.events)) < 0.8  # the deadline is 1 s, the lease 3 s
    (failed,) = d.take_events()
    assert isinstance(failed, ReceiveFailed)
    assert failed.contiguous_tokens == 0
    d.link.drop_peer(peer.info.ref)
    assert d.link.counts()[:3] == (0, 0, 0)


@pytest.mark.slow
def test_a_stopped_peer_costs_a_deadline_and_comes_back_over_tcp(peer: Peer, fakes: ModuleType) -> None:
    d = peer.d
    peer.receive("first")
    peer.run_until(lambda: bool(d.events))
    assert [type(e) for e in d.take_events()] == [HandedOver]
    peer.say("withhold")
    peer.receive("second")
    (ring,) = d.link._receiving._rings.values()
    peer.run_until(lambda: bool(ring.announced))
    os.kill(peer.process.pid, signal.SIGSTOP)
    peer.run_until(lambda: bool(d.events), 2.8)
    assert [type(e) for e in d.take_events()] == [ReceiveFailed]
    assert d.link.transport_of(peer.info.ref) == "tcp"
    os.kill(peer.process.pid, signal.SIGCONT)
    d.store.pool[:] = fakes.POISON
    peer.receive("third")
    peer.run_until(lambda: bool(d.events))
    assert [type(e) for e in d.take_events()] == [HandedOver]
    np.testing.assert_array_equal(d.store.read([6, 7, 8, 9, 10], 0, 20), fakes.kv_of(1, 20))


if __name__ == "__main__":
    run_peer(sys.argv[1], bytes.fromhex(sys.argv[2]))
