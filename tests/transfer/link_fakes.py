"""What the tests of KVLink stand on: a pool in numpy, a network whose every message can be held, lost or repeated."""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from xxhash import xxh3_64_intdigest

from baton.core.config import NetworkConfig, TransferConfig
from baton.core.layout import BlockLayout
from baton.core.messages import Message, NodeRef, Role, WorkerInfo
from baton.transfer.backends.cuda_device import CudaError
from baton.transfer.backends.ring_backend import DeviceBuffer, PieceBuffer
from baton.transfer.channels import Incoming, PeerUnreachable, WorkerChannels
from baton.transfer.keys import ClusterKeys
from baton.transfer.link import KVLink, LinkEvent

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 3, 2, 4
POISON = -7.0


def layout_of(block_size: int) -> BlockLayout:
    return BlockLayout(NUM_LAYERS, NUM_HEADS, HEAD_DIM, block_size, "float32")


BYTES_PER_TOKEN = layout_of(1).bytes_per_token


def kv_of(seed: int, num_tokens: int) -> np.ndarray:
    """KV of a prompt, `[num_layers, 2, num_heads, num_tokens, head_dim]`; every number in it is different."""
    shape = (NUM_LAYERS, 2, NUM_HEADS, num_tokens, HEAD_DIM)
    return (np.arange(np.prod(shape), dtype=np.float32) + 10_000.0 * seed).reshape(shape)


class NumpyStore:
    """A KV cache pool that does one token at a time: slow and obvious. Starts poisoned."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.pool = np.full((num_blocks, NUM_LAYERS, 2, NUM_HEADS, block_size, HEAD_DIM), POISON, np.float32)

    def write(self, block_table: Sequence[int], start: int, kv: np.ndarray) -> None:
        for n in range(kv.shape[3]):
            block, offset = divmod(start + n, self.block_size)
            self.pool[block_table[block], :, :, :, offset] = kv[:, :, :, n]

    def read(self, block_table: Sequence[int], start: int, stop: int) -> np.ndarray:
        tokens = [divmod(n, self.block_size) for n in range(start, stop)]
        return np.stack([self.pool[block_table[b], :, :, :, o] for b, o in tokens], axis=3)

    def gather(
        self, block_table: Sequence[int], start: int, stop: int, out: PieceBuffer, *, first_layer: int, last_layer: int
    ) -> int:
        data = self.read(block_table, start, stop)[first_layer:last_layer].tobytes()
        target = out if isinstance(out, memoryview) else out.numpy()
        target[:] = np.frombuffer(data, np.uint8)
        return len(data)

    def checksum(self, piece: DeviceBuffer) -> int:
        return xxh3_64_intdigest(piece.numpy())

    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        piece: PieceBuffer,
        *,
        first_layer: int,
        last_layer: int,
    ) -> None:
        data = piece if isinstance(piece, memoryview) else piece.numpy()
        kv = np.frombuffer(data, np.float32).reshape(last_layer - first_layer, 2, NUM_HEADS, stop - start, HEAD_DIM)
        for n in range(stop - start):
            block, offset = divmod(start + n, self.block_size)
            self.pool[block_table[block], first_layer:last_layer, :, :, offset] = kv[:, :, :, n]


class FakeCudaDevice:
    """A card whose memory is the host's; handles work between all fakes of this process, as real ones on one host.

    Misuse that the real driver answers with undefined behaviour fails here.
    """

    def __init__(self) -> None:
        self.allocated: dict[int, bytearray] = {}
        self.exported: dict[bytes, int] = {}
        self.mapped: dict[int, int] = {}  # address as mapped |-> address as allocated
        self.pinned: dict[int, int] = {}  # address of host memory |-> bytes
        self.refuses: set[str] = set()  # names of methods
        self._next_address = 1 << 40

    def _address(self) -> int:
        self._next_address += 1 << 30
        return self._next_address

    def _check(self, what: str) -> None:
        if what in self.refuses:
            raise CudaError(f"{what} was refused")

    def allocate(self, num_bytes: int) -> int:
        self._check("allocate")
        self.allocated[address := self._address()] = bytearray(num_bytes)
        return address

    def free(self, pointer: int) -> None:
        assert pointer not in self.mapped.values(), "memory that another process maps was freed"
        del self.allocated[pointer]

    def export(self, pointer: int) -> bytes:
        self._check("export")
        handle = secrets.token_bytes(64)
        self.exported[handle] = pointer
        return handle

    def open(self, handle: bytes) -> int:
        self._check("open")
        if handle not in self.exported:
            raise CudaError("no such memory")
        self.mapped[address := self._address()] = self.exported[handle]
        return address

    def close(self, pointer: int) -> None:
        del self.mapped[pointer]

    def tensor(self, pointer: int, num_bytes: int) -> torch.Tensor:
        self._check("tensor")
        memory = self.allocated[self.mapped.get(pointer, pointer)]
        return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def pin(self, address: int, num_bytes: int) -> None:
        self._check("pin")
        assert address not in self.pinned
        self.pinned[address] = num_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


class FakeNccl:
    """torch's ProcessGroupNCCL as far as Baton uses it, over gloo."""

    class Options:
        _timeout: timedelta

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        gloo: Any = torch.distributed.ProcessGroupGloo
        self._group = gloo(store, rank, size, options._timeout)
        self.num_aborts = 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._group.send(tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._group.recv(tensors, peer, tag)

    def abort(self) -> None:
        self.num_aborts += 1
        with suppress(RuntimeError):
            self._group.recv([torch.empty(1, dtype=torch.uint8)], 1 - self._group.rank(), 99).wait(
                timedelta(0, 0, 1000)
            )


def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The NCCL code path on the CPU."""
    free = iter(range(10**9, 0, -1000))  # each look at the card finds 1000 bytes less
    module = "baton.transfer.backends.process_group"
    monkeypatch.setattr(f"{module}.DEVICES", {"gloo": "cpu", "nccl": "cpu"})
    monkeypatch.setattr(f"{module}.NCCL_ENVIRONMENT", {})
    monkeypatch.setattr(f"{module}.torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr(f"{module}.torch.distributed.ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(f"{module}.torch.cuda.mem_get_info", lambda: (next(free), 10**9))
    monkeypatch.setattr(f"{module}.torch.cuda.Stream", object)
    monkeypatch.setattr(f"{module}.torch.cuda.stream", lambda stream: nullcontext())


class FakeNetwork:
    """Messages under way, in the order of sending. The script decides which arrives next, which is lost or repeated."""

    def __init__(self) -> None:
        self.under_way: list[tuple[NodeRef, Incoming]] = []  # (receiver, message)
        self.channels: dict[NodeRef, FakeChannels] = {}

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        to, incoming = self.under_way[index] if keep else self.under_way.pop(index)
        if to in self.channels:
            self.channels[to].arrived.append(incoming)

    def lose(self, index: int = 0) -> Message:
        return self.under_way.pop(index)[1].body

    def deliver_all(self) -> None:
        while self.under_way:
            self.deliver()


class FakeChannels:
    def __init__(self, network: FakeNetwork, info: WorkerInfo) -> None:
        self._network = network
        self._info = info
        self._peers: dict[NodeRef, WorkerInfo] = {}
        self.arrived: list[Incoming] = []
        network.channels[info.ref] = self

    def add_peer(self, info: WorkerInfo) -> None:
        self._peers[info.ref] = info

    def remove_peer(self, ref: NodeRef) -> None:
        self._peers.pop(ref, None)

    def peer_info(self, ref: NodeRef) -> WorkerInfo:
        if ref not in self._peers:
            raise PeerUnreachable(f"{ref.node_id} is not known")
        return self._peers[ref]

    def send(self, to: NodeRef, body: Message, payload: bytearray | None = None) -> None:
        self.peer_info(to)
        frame = None if payload is None else memoryview(bytearray(payload))
        self._network.under_way.append((to, Incoming(self._info.ref, body, frame)))

    def wake(self) -> None:
        pass  # nobody waits here

    def poll(self, timeout_s: float) -> list[Incoming]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def close(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0


class Node:
    """One worker as far as hand-overs go: channels, link, pool, and the events its roles would have seen."""

    def __init__(
        self,
        channels: FakeChannels | WorkerChannels,
        info: WorkerInfo,
        store: NumpyStore,
        config: TransferConfig,
        run_dir: str,
        clock: Clock,
    ) -> None:
        self.channels, self.info, self.ref, self.store, self.clock = channels, info, info.ref, store, clock
        self.link = KVLink(channels, store, layout_of(store.block_size), config, run_dir, info)
        self.events: list[LinkEvent] = []

    def turn(self, timeout_s: float = 0.0) -> None:
        for incoming in self.channels.poll(timeout_s):
            self.events += self.link.handle(incoming, self.clock.now)
        self.events += self.link.pump(self.clock.now)

    def take_events(self) -> list[LinkEvent]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        self.link.close()
        self.channels.close()


def info_of(
    ref: NodeRef,
    host_digest: str,
    endpoints: tuple[str, ...],
    block_size: int = 4,
    num_blocks: int = 64,
    device_kind: str = "cpu",
) -> WorkerInfo:
    return WorkerInfo(
        ref=ref,
        roles=(Role.DECODE,),
        pid=1,
        device="cpu",
        model="m",
        model_digest="d",
        wire_digest=layout_of(block_size).wire_digest,
        host_digest=host_digest,
        endpoints=endpoints,
        block_size=block_size,
        num_blocks=num_blocks,
        context_length=256,
        max_running=8,
        threads=1,
        device_kind=device_kind,
        device_uuid=f"GPU-{ref.node_id}" if device_kind == "cuda" else "",
    )


class Cluster:
    """Nodes of one transport: "fake" over FakeNetwork, all others over real sockets.

    "cuda_ipc", "pinned_memory" and "nccl" need FakeCudaDevice, FakeCudaRuntime and fake_nccl in the place of the real.
    """

    def __init__(self, transport: str, tmp_path: Path) -> None:
        self.transport = transport
        self.clock = Clock()
        self.network = FakeNetwork()
        self.run_dir = tmp_path / "run"
        self.run_dir.mkdir(mode=0o700)
        self._keys = ClusterKeys.create(tmp_path / "keys")
        self.nodes: list[Node] = []

    def add(
        self,
        name: str,
        block_size: int = 4,
        num_blocks: int = 64,
        *,
        slots: int = 4,
        slot_tokens: float = 3,
        lease_s: float = 12.0,
        transport: str = "",
    ) -> Node:
        ref = NodeRef(name, secrets.randbits(62) + 1)
        shares = self.transport in ("shared_memory", "cuda_ipc", "pinned_memory")
        kind = "cuda" if self.transport in ("nccl", "cuda_ipc", "pinned_memory") else "cpu"
        run_dir = str(self.run_dir) if shares else ""
        named = self.transport in ("gloo", "nccl", "pinned_memory")  # what "auto" would not take here
        transport = transport or (self.transport if named else "auto")
        config = TransferConfig(transport, slots, int(slot_tokens * BYTES_PER_TOKEN) + 5, lease_s)
        info = info_of(ref, name, (), block_size, num_blocks, kind)
        channels: FakeChannels | WorkerChannels
        if self.transport == "fake":
            channels = FakeChannels(self.network, info)
        else:
            channels = WorkerChannels(NetworkConfig(run_dir, "127.0.0.1", (), ""), ref, self._keys)
            info = info_of(ref, channels.host_digest, channels.endpoints, block_size, num_blocks, kind)
        node = Node(channels, info, NumpyStore(block_size, num_blocks), config, run_dir, self.clock)
        for other in self.nodes:
            other.channels.add_peer(info)
            node.channels.add_peer(other.info)
        self.nodes.append(node)
        return node

    def remove(self, node: Node) -> None:
        """The node dies; nobody has been told yet."""
        self.nodes.remove(node)
        self.network.channels.pop(node.ref, None)
        node.close()

    def turn(self) -> None:
        self.network.deliver_all()
        for node in self.nodes:
            node.turn(0.002)

    def run_until(self, condition: Callable[[], bool], bound_s: float = 10.0) -> None:
        """Turns of all nodes until `condition` holds; fails after a bound of real time."""
        deadline = time.monotonic() + bound_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            self.turn()

    def settle(self) -> None:
        """Turns until nothing moves any more and every hand-over and slot is gone."""
        self.run_until(lambda: all(node.link.counts()[:3] == (0, 0, 0) for node in self.nodes))
        self.turn()  # events of calls come with the next turn

    def close(self) -> None:
        for node in self.nodes:
            node.close()
