"""The staging memory itself: who may offer what, what stays behind, what is said when there is no room."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from baton.core.errors import ConfigurationError, RemoteProtocolError
from baton.core.messages import RingOffer
from baton.core.timeline import Timeline
from baton.transfer.backends.shared_memory import SharedMemoryReceiver, SharedMemorySender
from baton.transfer.backends.tcp import TcpReceiver, TcpSender
from baton.transfer.channels import Incoming
from baton.transfer.link import HandedOver, ReceiveFailed


@pytest.fixture
def cluster(fakes: ModuleType, tmp_path: Path) -> Iterator[Any]:
    made = fakes.Cluster("shared_memory", tmp_path)
    yield made
    made.close()


def test_a_ring_is_private_fully_allocated_and_gone_after_the_first_piece(tmp_path: Path) -> None:
    receiver = SharedMemoryReceiver(str(tmp_path), 4, 8192)
    (path,) = tmp_path.iterdir()
    status = path.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_size) == (0o600, 4 * 8192)
    assert status.st_blocks * 512 >= 4 * 8192
    sender = SharedMemorySender(str(tmp_path), receiver.name, 4, 8192)
    sender.write(2, 5)[:] = b"hello"
    assert sender.payload_for(2) is None
    first = receiver.read(2, 5, None)
    assert bytes(first) == b"hello"
    assert not list(tmp_path.iterdir())
    sender.write(2, 5)[:] = b"later"
    assert bytes(first) == b"hello"  # a private copy
    assert bytes(receiver.read(2, 5, None)) == b"later"
    receiver.close()
    sender.close()


def test_a_ring_nobody_attached_is_removed_at_close(tmp_path: Path) -> None:
    SharedMemoryReceiver(str(tmp_path), 1, 100).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "../" + "a" * 29, "a" * 31, "A" * 32, "a" * 31 + "/", "a" * 32 + "\n", "b" * 32])
def test_names_that_are_not_ours_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{'a' * 32}.ring").write_bytes(b"x" * 100)
    with pytest.raises(RemoteProtocolError):
        SharedMemorySender(str(tmp_path), name, 1, 100)


def test_without_a_run_directory_nothing_is_opened() -> None:
    with pytest.raises(RemoteProtocolError):
        SharedMemorySender("", "a" * 32, 1, 100)


@pytest.mark.parametrize("what", ["symlink", "directory", "open to others", "too short", "too long"])
def test_files_that_are_not_a_private_ring_are_refused(tmp_path: Path, what: str) -> None:
    path, target = tmp_path / f"{'a' * 32}.ring", tmp_path / "target"
    target.write_bytes(b"x" * 100)
    target.chmod(0o600)
    match what:
        case "symlink":
            path.symlink_to(target)
        case "directory":
            path.mkdir(mode=0o700)
        case _:
            path.write_bytes(b"x" * {"too short": 99, "too long": 101}.get(what, 100))
            path.chmod(0o640 if what == "open to others" else 0o600)
    with pytest.raises(RemoteProtocolError):
        SharedMemorySender(str(tmp_path), "a" * 32, 1, 100)


def test_no_room_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZQ09: a directory that is too small is an error with its name and the size, not a SIGBUS under load."""
    _no_room(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"32 MiB.*--transport tcp") as caught:
        SharedMemoryReceiver(str(tmp_path), 16, 2 * 1024 * 1024)
    assert str(tmp_path) in str(caught.value)
    assert not list(tmp_path.iterdir())


def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)


def test_a_run_directory_that_is_gone_is_an_error_and_no_crash(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        SharedMemoryReceiver(str(tmp_path / "gone"), 2, 64)


def test_a_ring_that_cannot_be_mapped_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = SharedMemoryReceiver(str(tmp_path), 2, 64)

    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("baton.transfer.backends.shared_memory.mmap.mmap", no_memory)
    with pytest.raises(RemoteProtocolError, match="cannot be mapped"):
        SharedMemorySender(str(tmp_path), receiver.name, 2, 64)
    receiver.close()


@pytest.mark.parametrize("transport", ["auto", "shared_memory"])
def test_no_room_for_a_ring_means_tcp_unless_shared_memory_was_asked_for(
    fakes: ModuleType, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    _no_room(monkeypatch)
    p, d = cluster.add("prefill-0"), cluster.add("decode-0", transport=transport)
    assert d.link.transport_of(p.ref) == "shared_memory"
    _hand_over(cluster, fakes, p, d)
    (event,) = d.take_events()
    if transport == "auto":
        assert isinstance(event, HandedOver)
        assert d.link.transport_of(p.ref) == "tcp"
    else:
        assert isinstance(event, ReceiveFailed)
        assert "no room" in event.reason


def test_a_sender_that_cannot_attach_gets_a_tcp_ring_next_time(
    fakes: ModuleType, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")

    def broken(*_: object) -> None:
        raise RemoteProtocolError("no such file")

    monkeypatch.setattr("baton.transfer.rings.SharedMemorySender", broken)
    _hand_over(cluster, fakes, p, d)
    (event,) = d.take_events()
    assert isinstance(event, ReceiveFailed)
    _hand_over(cluster, fakes, p, d)
    (event,) = d.take_events()
    assert isinstance(event, HandedOver)
    assert d.link.transport_of(p.ref) == "tcp"
    assert not list((tmp_path / "run").glob("*.ring"))


def _hand_over(cluster: Any, fakes: ModuleType, p: Any, d: Any) -> None:
    kv = fakes.kv_of(1, 9)
    p.store.write([1, 2, 3], 0, kv)
    p.link.open_sender("r", d.ref, [1, 2, 3], 9, cluster.clock.now)
    d.link.open_receiver("r", p.ref, [4, 5, 6], 0, 9, cluster.clock.now)
    p.link.computed("r", 9, cluster.clock.now)
    p.link.finish("r", b"hidden", 0, Timeline(), cluster.clock.now)
    cluster.settle()


@pytest.mark.parametrize(
    ("transport", "name", "slots", "slot_bytes"),
    [
        ("tcp", "", 0, 10_000),
        ("tcp", "", -1, 10_000),
        ("tcp", "", 10**9, 10_000),
        ("tcp", "", 4, 10),
        ("rdma", "", 4, 10_000),
        ("shared_memory", "../../etc/passwd", 4, 10_000),
        ("shared_memory", "c" * 32, 10**3, 10**15),
    ],
)
def test_offers_that_make_no_sense_are_sent_back(
    fakes: ModuleType, cluster: Any, tmp_path: Path, transport: str, name: str, slots: int, slot_bytes: int
) -> None:
    """PD20: sizes of a peer are bounded before anything is allocated."""
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    p.link.handle(Incoming(d.ref, RingOffer(7, transport, name, slots, slot_bytes)), cluster.clock.now)
    assert p.link.counts().messages_refused == 1
    _hand_over(cluster, fakes, p, d)
    assert isinstance(d.take_events()[0], HandedOver)


def test_tcp_pieces_are_fresh_memory_and_must_have_their_size() -> None:
    sender, receiver = TcpSender(), TcpReceiver()
    sender.write(0, 3)[:] = b"abc"
    sender.write(1, 3)[:] = b"def"
    assert (sender.payload_for(0), sender.payload_for(1)) == (b"abc", b"def")
    assert bytes(receiver.read(0, 3, memoryview(b"abc"))) == b"abc"
    for payload in (None, memoryview(b"ab"), memoryview(b"abcd")):
        with pytest.raises(RemoteProtocolError):
            receiver.read(0, 3, payload)


@pytest.mark.parametrize(("slots", "slot_tokens"), [(4, 0), (0, 3), (5000, 3), (4, 10**6)])
def test_a_ring_that_cannot_work_is_an_error_at_start(
    fakes: ModuleType, tmp_path: Path, slots: int, slot_tokens: int
) -> None:
    cluster = fakes.Cluster("fake", tmp_path)  # has no sockets to close
    with pytest.raises(ConfigurationError):
        cluster.add("decode-0", slots=slots, slot_tokens=slot_tokens)
