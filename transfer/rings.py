"""Which transport a pair of workers uses, and the making of the two ends of its ring.

The receiver chooses: the first of the transports for this pair that has not failed between them. What fails once is
left alone until the peer's next life.
"""

import logging
from collections import defaultdict

from ..core.config import TransferConfig
from ..core.errors import ConfigurationError, RemoteProtocolError
from ..core.messages import MAX_FRAME_BYTES, NodeRef, RingOffer, WorkerInfo
from .backends.cuda_device import CudaDevice, CudaError, cuda_device
from .backends.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from .backends.pinned_memory import PinnedMemoryReceiver, PinnedMemorySender
from .backends.process_group import GroupReceiver, GroupSender, GroupSettings
from .backends.ring_backend import ReceiverBackend, RingBackend, SenderBackend
from .backends.shared_memory import SharedMemoryReceiver, SharedMemorySender
from .backends.tcp import TcpReceiver, TcpSender
from .link_types import MessageChannels
from .wire import PeerUnreachable

logger = logging.getLogger(__name__)

MAX_RING_SLOTS = 1024
MAX_SLOT_BYTES = MAX_FRAME_BYTES
MAX_RING_BYTES = 1024 * 1024 * 1024
ON_ONE_HOST = ("shared_memory", "cuda_ipc", "pinned_memory")
JOIN_TIMEOUT_S = 8.0  # for threads of groups, at close; one that connects cannot be interrupted


def transports_for(wanted: str, me: WorkerInfo, peer: WorkerInfo) -> tuple[str, ...]:
    """How KV may come from `peer` to `me`, best first. Raises ConfigurationError when `wanted` cannot be.

    Two ranks of one NCCL group must be on different cards.
    """
    one_host = peer.host_digest == me.host_digest
    cards = {info.device_uuid for info in (me, peer) if info.device_kind == "cuda"}
    both_cuda = me.device_kind == peer.device_kind == "cuda"
    names = f"{peer.ref.node_id} and {me.ref.node_id}"
    if wanted in ON_ONE_HOST and not one_host:
        raise ConfigurationError(f"{names} share no run directory; use --transport auto or tcp")
    if wanted in ("nccl", "cuda_ipc", "pinned_memory") and not both_cuda:
        raise ConfigurationError(f"{names} are not both on a GPU, which {wanted} needs; use --transport auto")
    match wanted:
        case "auto" if one_host and both_cuda:
            return ("cuda_ipc", "pinned_memory", "shared_memory", "tcp")
        case "auto" if one_host:
            return ("shared_memory", "tcp")
        case "auto" if both_cuda and len(cards) == 2:
            return ("nccl", "tcp")
        case "cuda_ipc" | "pinned_memory":
            return tuple(dict.fromkeys((wanted, "pinned_memory", "shared_memory", "tcp")))
        case "nccl" if len(cards) == 1:
            raise ConfigurationError(f"{names} are on one card, and NCCL needs two; use --transport auto")
        case "auto" | "tcp":
            return ("tcp",)
    return (wanted, "tcp")


class RingMaker:
    """Makes rings, remembers what failed with whom, and sees that threads of closed rings have ended.

    `run_dir`: the run's directory, "" when this worker has none.
    """

    def __init__(self, config: TransferConfig, run_dir: str, me: WorkerInfo, channels: MessageChannels) -> None:
        self._config = config
        self._run_dir = run_dir
        self._me = me
        self._channels = channels
        self._failed: defaultdict[NodeRef, set[str]] = defaultdict(set)
        self._closed: list[RingBackend] = []  # those whose threads may still run
        self._kept: dict[
            tuple[NodeRef, int], ReceiverBackend
        ] = {}  # (sender, ring id) |-> given up, still mapped there

    def transport_to(self, peer: NodeRef) -> str:
        """Of the ring that would be made now. Raises PeerUnreachable, ConfigurationError."""
        possible = transports_for(self._config.transport, self._me, self._channels.peer_info(peer))
        return next(transport for transport in possible if transport not in self._failed[peer])

    def failed(self, peer: NodeRef, transport: str, reason: str) -> None:
        """This transport is not tried again with this life of the peer. TCP is always tried again."""
        if transport != "tcp" and transport not in self._failed[peer]:
            self._failed[peer].add(transport)
            logger.warning("KV from %s does not come over %s any more: %s", peer.node_id, transport, reason)

    def forget(self, peer: NodeRef) -> None:
        """The peer is dead, and with it what it had mapped."""
        self._failed.pop(peer, None)
        for kept in [kept for kept in self._kept if kept[0] == peer]:
            self._kept.pop(kept).close()

    def let_go(self, peer: NodeRef, ring_id: int) -> bool:
        """The sender has closed its end of a ring given up here. False when this is no such ring."""
        backend = self._kept.pop((peer, ring_id), None)
        if backend is not None:
            backend.close()
        return backend is not None

    def make(self, peer: NodeRef) -> ReceiverBackend:
        """The receiving end. Raises PeerUnreachable, and ConfigurationError when the memory asked for is not there."""
        while True:  # ends with TCP, which needs nothing
            transport = self.transport_to(peer)
            try:
                return self._make(transport, peer)
            except ConfigurationError as error:
                if self._config.transport == transport == "shared_memory":
                    raise  # no other memory was asked for
                self.failed(peer, transport, str(error))

    def _make(self, transport: str, peer: NodeRef) -> ReceiverBackend:
        config = self._config
        match transport:
            case "shared_memory":
                return SharedMemoryReceiver(self._run_dir, config.ring_slots, config.slot_bytes)
            case "pinned_memory":
                return PinnedMemoryReceiver(_card(), self._run_dir, config.ring_slots, config.slot_bytes)
            case "cuda_ipc":
                return CudaIpcReceiver(_card(), self._me.device_uuid, config.ring_slots, config.slot_bytes)
            case "gloo" | "nccl":
                return GroupReceiver(
                    self._group_settings(transport, config.ring_slots, config.slot_bytes), peer.node_id
                )
        return TcpReceiver()

    def attach(self, offer: RingOffer, least_bytes: int, peer: NodeRef) -> SenderBackend:
        """The sending end of the ring a peer offers, whose slots must hold `least_bytes`.

        Raises RemoteProtocolError for one that cannot be used.
        """
        num_bytes = offer.num_slots * offer.slot_bytes
        slots_fit = 1 <= offer.num_slots <= MAX_RING_SLOTS and num_bytes <= MAX_RING_BYTES
        if not (slots_fit and least_bytes <= offer.slot_bytes <= MAX_SLOT_BYTES):
            raise RemoteProtocolError(f"a ring of {offer.num_slots} slots of {offer.slot_bytes} bytes")
        try:
            return self._attach(offer, peer)
        except (ConfigurationError, PeerUnreachable) as error:
            raise RemoteProtocolError(str(error)) from error

    def _attach(self, offer: RingOffer, peer: NodeRef) -> SenderBackend:
        ring = (offer.ring_name, offer.num_slots, offer.slot_bytes)
        match offer.transport:
            case "shared_memory":
                return SharedMemorySender(self._run_dir, *ring)
            case "pinned_memory":
                return PinnedMemorySender(_card(), self._run_dir, *ring)
            case "cuda_ipc":
                peer_uuid = self._channels.peer_info(peer).device_uuid
                return CudaIpcSender(_card(), offer.ring_name, peer_uuid, offer.num_slots, offer.slot_bytes)
            case "gloo" | "nccl":
                settings = self._group_settings(offer.transport, offer.num_slots, offer.slot_bytes)
                return GroupSender(settings, peer.node_id)
            case "tcp":
                return TcpSender()
        raise RemoteProtocolError(f"a ring over {offer.transport!r}, which this worker does not know")

    def _group_settings(self, library: str, num_slots: int, slot_bytes: int) -> GroupSettings:
        return GroupSettings(
            library=library,
            listen_host=listen_host_of(self._me),
            num_slots=num_slots,
            slot_bytes=slot_bytes,
            form_deadline_s=self._config.lease_s / 2,
            operation_deadline_s=self._config.lease_s / 3,
            wake=self._channels.wake,
        )

    def give_up(self, peer: NodeRef, ring_id: int, backend: ReceiverBackend) -> None:
        """Release a receiving end whose sender lives and may not have closed the other."""
        if backend.kept_for_sender:
            self._kept[peer, ring_id] = backend
        else:
            self.release(backend)

    def release(self, backend: RingBackend) -> None:
        """Close one end, now or soon: nothing here waits."""
        backend.close()
        self._closed = [closed for closed in (*self._closed, backend) if not closed.join(0.0)]

    def close(self) -> None:
        """Wait for the threads of all ends released. What senders may still have mapped goes with this process."""
        for backend in self._closed:
            if not backend.join(JOIN_TIMEOUT_S):
                logger.warning("the thread of a %s ring does not end; it is left behind", backend.transport)


def _card() -> CudaDevice:
    """This worker's. Raises ConfigurationError where it cannot be used."""
    try:
        return cuda_device()
    except CudaError as error:
        raise ConfigurationError(str(error)) from error


def listen_host_of(info: WorkerInfo) -> str:
    """The address of this worker's own TCP endpoint ("" when it has none: whatever the host is called)."""
    endpoint = next((e for e in info.endpoints if e.startswith("tcp://")), "")
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
