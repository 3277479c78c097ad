"""Rings in device memory and in pinned memory, on a fake driver: what is refused, what takes its place, what is freed.

The calls of the real driver are checked against a library that records them.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from baton.core.errors import ConfigurationError, RemoteProtocolError
from baton.core.messages import RingOffer
from baton.core.timeline import Timeline
from baton.transfer.backends.cuda_device import CudaDevice, CudaError
from baton.transfer.backends.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from baton.transfer.backends.pinned_memory import PinnedMemoryReceiver
from baton.transfer.backends.process_group import GroupSender, GroupSettings
from baton.transfer.channels import Incoming
from baton.transfer.link import HandedOver, ReceiveFailed

UUID = "GPU-prefill-0"


@pytest.fixture
def cluster(fakes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    device = fakes.FakeCudaDevice()
    monkeypatch.setattr("baton.transfer.rings.cuda_device", lambda: device)
    made = fakes.Cluster("cuda_ipc", tmp_path)
    made.device = device
    yield made
    made.close()
    assert not device.mapped
    assert not device.pinned


def hand_over(cluster: Any, fakes: ModuleType, p: Any, d: Any) -> Any:
    """One prompt; the event of its end on D."""
    p.store.write([1, 2, 3], 0, fakes.kv_of(1, 9))
    p.link.open_sender("r", d.ref, [1, 2, 3], 9, cluster.clock.now)
    d.link.open_receiver("r", p.ref, [4, 5, 6], 0, 9, cluster.clock.now)
    p.link.computed("r", 9, cluster.clock.now)
    p.link.finish("r", b"hidden", 0, Timeline(), cluster.clock.now)
    cluster.settle()
    p.take_events()
    (event,) = d.take_events()
    return event


@pytest.mark.parametrize("step", ["allocate", "export", "tensor"])
def test_a_card_that_does_not_share_means_pinned_memory(cluster: Any, fakes: ModuleType, step: str) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    assert d.link.transport_of(p.ref) == "cuda_ipc"
    cluster.device.refuses.add(step)
    assert isinstance(hand_over(cluster, fakes, p, d), HandedOver)
    assert d.link.transport_of(p.ref) == "pinned_memory"
    assert not cluster.device.allocated
    assert len(cluster.device.pinned) == 3  # the ring on both sides, the receiver's private copy


@pytest.mark.parametrize("step", ["open", "tensor"])
def test_a_sender_that_cannot_map_the_ring_gets_pinned_memory_next_time(
    cluster: Any, fakes: ModuleType, step: str
) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    d.link.open_receiver("first", p.ref, [4, 5, 6], 0, 9, cluster.clock.now)  # D's end is made
    cluster.device.refuses.add(step)
    cluster.run_until(lambda: bool(d.events))
    assert isinstance(d.take_events()[0], ReceiveFailed)
    assert not cluster.device.allocated
    assert isinstance(hand_over(cluster, fakes, p, d), HandedOver)
    assert d.link.transport_of(p.ref) == "pinned_memory"


def test_memory_that_cannot_be_pinned_is_used_as_it_is(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0", transport="pinned_memory")
    cluster.device.refuses.add("pin")
    assert isinstance(hand_over(cluster, fakes, p, d), HandedOver)
    assert d.link.transport_of(p.ref) == "shared_memory"
    assert not list(cluster.run_dir.glob("*.ring"))


def test_a_sender_that_cannot_pin_refuses_the_ring(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0", transport="pinned_memory")
    d.link.open_receiver("first", p.ref, [4, 5, 6], 0, 9, cluster.clock.now)
    cluster.device.refuses.add("pin")
    cluster.run_until(lambda: bool(d.events))
    assert isinstance(d.take_events()[0], ReceiveFailed)
    assert isinstance(hand_over(cluster, fakes, p, d), HandedOver)
    assert d.link.transport_of(p.ref) == "shared_memory"
    assert not cluster.device.pinned


def test_pinned_memory_without_a_working_driver_is_used_as_it_is(
    cluster: Any, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver() -> None:
        raise CudaError("the CUDA driver cannot be loaded")

    monkeypatch.setattr("baton.transfer.rings.cuda_device", no_driver)
    p, d = cluster.add("prefill-0"), cluster.add("decode-0", transport="pinned_memory")
    assert isinstance(hand_over(cluster, fakes, p, d), HandedOver)
    assert d.link.transport_of(p.ref) == "shared_memory"


def test_a_failed_pin_leaves_no_file(fakes: ModuleType, tmp_path: Path) -> None:
    device = fakes.FakeCudaDevice()
    device.refuses.add("pin")
    with pytest.raises(ConfigurationError, match="cannot be pinned"):
        PinnedMemoryReceiver(device, str(tmp_path), 2, 64)
    assert not list(tmp_path.iterdir())


def test_memory_is_freed_after_the_sender_has_let_go(cluster: Any, fakes: ModuleType) -> None:
    """The fake driver fails when mapped memory is freed."""
    p, d = cluster.add("prefill-0", lease_s=8.0), cluster.add("decode-0", lease_s=8.0)
    hand_over(cluster, fakes, p, d)
    p.link.handle(Incoming(d.ref, RingOffer(5, "tcp", "", 4, 10_000)), cluster.clock.now)  # replaces it
    cluster.run_until(lambda: not cluster.device.allocated)
    assert not cluster.device.mapped
    assert isinstance(hand_over(cluster, fakes, p, d), HandedOver)
    d.link._receiving._give_up(p.ref, next(iter(d.link._receiving._rings.values())), "for the test")
    assert len(cluster.device.allocated) == 1
    cluster.run_until(lambda: not cluster.device.allocated)
    assert isinstance(hand_over(cluster, fakes, p, d), HandedOver)
    assert d.link.transport_of(p.ref) == "cuda_ipc"


def test_memory_a_dead_sender_mapped_is_freed(cluster: Any, fakes: ModuleType) -> None:
    p, d = cluster.add("prefill-0"), cluster.add("decode-0")
    hand_over(cluster, fakes, p, d)
    d.link._receiving._give_up(p.ref, next(iter(d.link._receiving._rings.values())), "for the test")
    hand_over(cluster, fakes, p, d)
    cluster.remove(p)
    d.link.drop_peer(p.ref)
    assert not cluster.device.allocated


@pytest.mark.parametrize(
    "name",
    ["", "a" * 128, f"{'a' * 127}:{UUID}", f"{'A' * 128}:{UUID}", f"{'a' * 128}:GPU-other", f"{'a' * 128}:{UUID}\n"],
)
def test_handles_that_are_none_are_not_opened(fakes: ModuleType, name: str) -> None:
    device = fakes.FakeCudaDevice()
    device.refuses.add("open")
    with pytest.raises(RemoteProtocolError, match="no handle"):
        CudaIpcSender(device, name, UUID, 4, 1000)


def test_a_slot_is_a_private_copy_when_it_is_read(fakes: ModuleType) -> None:
    device = fakes.FakeCudaDevice()
    receiver = CudaIpcReceiver(device, UUID, 3, 1000)
    assert (receiver.num_bytes, receiver.kept_for_sender) == (3 * 1024 + 1000, True)
    sender = CudaIpcSender(device, receiver.name, UUID, 3, 1000)
    sender.write(2, 5)[:] = 7
    copy = receiver.read(2, 5, None)
    sender.write(2, 5)[:] = 8
    assert copy.tolist() == [7] * 5
    assert receiver.read(2, 5, None).tolist() == [8] * 5
    assert receiver.read(1, 1000, None).tolist() == [0] * 1000
    sender.close()
    receiver.close()
    assert not device.allocated


def test_cards_without_a_known_uuid_share_memory_too(fakes: ModuleType) -> None:
    device = fakes.FakeCudaDevice()
    receiver = CudaIpcReceiver(device, "", 1, 10)
    sender = CudaIpcSender(device, receiver.name, "", 1, 10)
    sender.write(0, 3)[:] = 5
    assert receiver.read(0, 3, None).tolist() == [5, 5, 5]


def test_no_room_on_the_card_is_said(fakes: ModuleType) -> None:
    device = fakes.FakeCudaDevice()
    device.refuses.add("allocate")
    with pytest.raises(ConfigurationError, match="no room for a staging ring of 32 MiB"):
        CudaIpcReceiver(device, UUID, 16, 2 * 1024 * 1024)


# ---- the driver's calls, against a library that records them --------------------------------------------------------


class FakeLibrary:
    """libcuda as far as CudaDevice calls it: numbers in, numbers out, each call recorded."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        self.base_offset = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.fails:
                return self.fails[name]
            match name:
                case "cuMemAlloc_v2":
                    assert arguments[1].value % (2 * 1024 * 1024) == 0
                    arguments[0]._obj.value = 0x7000_0000_0000
                case "cuMemGetAddressRange_v2":
                    arguments[0]._obj.value = arguments[2].value - self.base_offset
                case "cuIpcGetMemHandle":
                    assert arguments[1].value == 0x7000_0000_0000
                    ctypes.memset(ctypes.addressof(arguments[0]._obj), 0xAB, 64)
                case "cuIpcOpenMemHandle_v2":
                    assert bytes(arguments[1]) == b"\xab" * 64
                    assert arguments[2] == 1
                    arguments[0]._obj.value = 0x7100_0000_0000
                case "cuMemHostRegister_v2":
                    assert [argument.value for argument in arguments] == [0x7200_0000_0000, 640, 0]
                case "cuMemHostUnregister":
                    assert arguments[0].value == 0x7200_0000_0000
                case "cuGetErrorName":
                    arguments[1]._obj.value = b"CUDA_ERROR_TEST"
            return 0

        call.argtypes = ()  # type: ignore[attr-defined]
        self.__dict__[name] = call
        return call


class FakeStream:
    def __init__(self, priority: int) -> None:
        self.priority = priority


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    made = FakeLibrary()
    monkeypatch.setattr("baton.transfer.backends.cuda_device.ctypes.CDLL", lambda name: made)
    monkeypatch.setattr("baton.transfer.backends.cuda_device.torch.cuda.Stream", FakeStream)
    return made


def test_the_drivers_calls_and_their_context(library: FakeLibrary) -> None:
    device = CudaDevice()
    assert library.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    library.calls.clear()
    pointer = device.allocate(5)
    assert pointer == 0x7000_0000_0000
    assert device.export(pointer) == b"\xab" * 64
    assert device.open(b"\xab" * 64) == 0x7100_0000_0000
    device.close(0x7100_0000_0000)
    device.free(pointer)
    device.pin(0x7200_0000_0000, 640)
    device.unpin(0x7200_0000_0000)
    inside = ["cuMemAlloc_v2", "cuMemGetAddressRange_v2"], ["cuIpcGetMemHandle"], ["cuIpcOpenMemHandle_v2"]
    expected = []
    outside = ["cuIpcCloseMemHandle"], ["cuMemFree_v2"], ["cuMemHostRegister_v2"], ["cuMemHostUnregister"]
    for calls in (*inside, *outside):
        expected += ["cuCtxPushCurrent_v2", *calls, "cuCtxPopCurrent_v2"]
    assert library.calls == expected


def test_a_tensor_over_raw_memory_is_of_the_card_that_is_said(library: FakeLibrary) -> None:
    """Asking the driver whose memory it is would find no card that torch knows when it is a peer's."""
    device = CudaDevice()
    assert device._torch_device == torch.device("cuda", 0)
    device._torch_device = torch.device("cpu")
    memory = (ctypes.c_uint8 * 6)(1, 2, 3, 4, 5, 6)
    tensor = device.tensor(ctypes.addressof(memory), 5)
    assert (tensor.dtype, tensor.tolist()) == (torch.uint8, [1, 2, 3, 4, 5])
    tensor[4] = 9
    assert list(memory) == [1, 2, 3, 4, 9, 6]


def test_memory_for_copies_is_allocated_for_their_stream(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compute stream's part of torch's allocator hands out memory that launched steps still write to."""
    device, entered = CudaDevice(), []

    @contextmanager
    def stream(made: object) -> Iterator[None]:
        entered.append(made)
        yield
        entered.append("left")

    def empty(*arguments: Any, **named: Any) -> torch.Tensor:
        assert entered == [device._stream]
        return torch.zeros(3, dtype=torch.uint8)

    monkeypatch.setattr("baton.transfer.backends.cuda_device.torch.cuda.stream", stream)
    monkeypatch.setattr("baton.transfer.backends.cuda_device.torch.empty", empty)
    assert device.empty(3).tolist() == [0, 0, 0]
    assert entered == [device._stream, "left"]
    assert device._stream.priority < 0  # before forward passes


def test_a_refusal_has_the_drivers_name_and_leaves_the_context(library: FakeLibrary) -> None:
    device = CudaDevice()
    library.fails["cuIpcOpenMemHandle_v2"] = 201
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2 failed with CUDA_ERROR_TEST"):
        device.open(b"\xab" * 64)
    assert library.calls[-1] == "cuCtxPopCurrent_v2"


def test_memory_inside_a_chunk_is_not_shared(library: FakeLibrary) -> None:
    device = CudaDevice()
    library.base_offset = 512
    with pytest.raises(CudaError, match="chunk"):
        device.allocate(5)
    assert "cuMemFree_v2" in library.calls


def test_without_a_driver_it_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("baton.transfer.backends.cuda_device.ctypes.CDLL", missing)
    with pytest.raises(CudaError, match=r"libcuda\.so\.1"):
        CudaDevice()


def test_slots_of_a_group_are_not_memory_that_steps_still_use(
    fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.fake_nccl(monkeypatch)
    module = "baton.transfer.backends.process_group"
    streams: list[object] = []

    @contextmanager
    def stream(made: object) -> Iterator[None]:
        streams.append(made)
        yield
        streams.pop()

    def empty(size: int, **named: Any) -> torch.Tensor:
        assert (named["device"], len(streams)) == ("cuda", 1)
        return torch.zeros(size, dtype=named["dtype"])

    monkeypatch.setattr(f"{module}.DEVICES", {"nccl": "cuda"})
    monkeypatch.setattr(f"{module}.PairGroup", lambda *arguments: None)
    monkeypatch.setattr(f"{module}.torch.cuda.stream", stream)
    monkeypatch.setattr(f"{module}.torch.empty", empty)
    settings = GroupSettings("nccl", "", 2, 100, 1.0, 1.0, lambda: None)
    assert GroupSender(settings, "decode-0").write(1, 100).nbytes == 100
