"""Which transport a pair uses: a table."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from baton.core.errors import ConfigurationError
from baton.core.messages import NodeRef, WorkerInfo
from baton.core.timeline import Timeline
from baton.transfer.link import HandedOver
from baton.transfer.rings import listen_host_of, transports_for

CPU, CARD_A, CARD_B = ("cpu", ""), ("cuda", "GPU-a"), ("cuda", "GPU-b")


def worker(fakes: ModuleType, device: tuple[str, str], host: str) -> WorkerInfo:
    info = fakes.info_of(NodeRef("w", 1), host, ("ipc:///run/w.sock", "tcp://10.1.2.3:4567"))
    return msgspec.structs.replace(info, device_kind=device[0], device_uuid=device[1])


@pytest.mark.parametrize(
    ("wanted", "mine", "its", "one_host", "expected"),
    [
        ("auto", CPU, CPU, True, ("shared_memory", "tcp")),
        ("auto", CPU, CPU, False, ("tcp",)),
        ("auto", CPU, CARD_A, True, ("shared_memory", "tcp")),
        ("auto", CARD_A, CPU, False, ("tcp",)),
        ("auto", CARD_A, CARD_B, True, ("cuda_ipc", "pinned_memory", "shared_memory", "tcp")),
        ("auto", CARD_A, CARD_A, True, ("cuda_ipc", "pinned_memory", "shared_memory", "tcp")),
        ("auto", CARD_A, CARD_B, False, ("nccl", "tcp")),
        ("auto", CARD_A, CARD_A, False, ("tcp",)),
        ("tcp", CARD_A, CARD_B, True, ("tcp",)),
        ("gloo", CPU, CPU, True, ("gloo", "tcp")),
        ("gloo", CPU, CPU, False, ("gloo", "tcp")),
        ("nccl", CARD_A, CARD_B, True, ("nccl", "tcp")),
        ("shared_memory", CPU, CPU, True, ("shared_memory", "tcp")),
        ("shared_memory", CPU, CPU, False, "share no run directory"),
        ("cuda_ipc", CARD_A, CARD_B, True, ("cuda_ipc", "pinned_memory", "shared_memory", "tcp")),
        ("pinned_memory", CARD_A, CARD_B, True, ("pinned_memory", "shared_memory", "tcp")),
        ("cuda_ipc", CARD_A, CARD_B, False, "share no run directory"),
        ("cuda_ipc", CARD_A, CPU, True, "not both on a GPU"),
        ("pinned_memory", CPU, CPU, True, "not both on a GPU"),
        ("nccl", CPU, CARD_A, False, "not both on a GPU"),
        ("nccl", CARD_A, CARD_A, True, "on one card"),
    ],
)
def test_the_table(
    fakes: ModuleType, wanted: str, mine: Any, its: Any, one_host: bool, expected: tuple[str, ...] | str
) -> None:
    me, peer = worker(fakes, mine, "here"), worker(fakes, its, "here" if one_host else "there")
    if isinstance(expected, tuple):
        assert transports_for(wanted, me, peer) == expected
    else:
        with pytest.raises(ConfigurationError, match=expected):
            transports_for(wanted, me, peer)


@pytest.mark.parametrize(
    ("endpoints", "host"),
    [
        (("ipc:///run/w.sock", "tcp://10.1.2.3:4567"), "10.1.2.3"),
        (("tcp://[fe80::1]:99",), "fe80::1"),
        (("ipc:///run/w.sock",), ""),
    ],
)
def test_where_a_group_listens(fakes: ModuleType, endpoints: tuple[str, ...], host: str) -> None:
    assert listen_host_of(fakes.info_of(NodeRef("w", 1), "h", endpoints)) == host


@pytest.fixture
def cluster(fakes: ModuleType, tmp_path: Path) -> Iterator[Any]:
    made = fakes.Cluster("tcp", tmp_path)
    yield made
    made.close()


def test_nccl_without_a_card_that_works_falls_back_to_tcp(
    fakes: ModuleType, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers that say they are on cards of two hosts, where torch cannot give memory on one."""
    inner = fakes.info_of

    def on_cards(*arguments: Any) -> WorkerInfo:
        info = inner(*arguments)
        return msgspec.structs.replace(info, device_kind="cuda", device_uuid=info.ref.node_id)

    def no_memory(*arguments: Any, **settings: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(fakes, "info_of", on_cards)
    monkeypatch.setattr("baton.transfer.backends.process_group.torch.empty", no_memory)
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    assert d.link.transport_of(p.ref) == "nccl"
    p.store.write([1, 2, 3], 0, fakes.kv_of(1, 9))
    p.link.open_sender("r", d.ref, [1, 2, 3], 9, cluster.clock.now)
    d.link.open_receiver("r", p.ref, [4, 5, 6], 0, 9, cluster.clock.now)
    p.link.computed("r", 9, cluster.clock.now)
    p.link.finish("r", b"hidden", 0, Timeline(), cluster.clock.now)
    cluster.settle()
    assert isinstance(d.take_events()[0], HandedOver)
    assert d.link.transport_of(p.ref) == "tcp"
