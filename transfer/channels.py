"""WorkerChannels: all sockets of a worker process, synchronous, used from its one loop. BeatThread: its sign of life.

    DEALER per gateway  -- dials each joined address; both directions
    ROUTER ipc, ROUTER tcp (CURVE)  -- what peers say to this worker; never answered on
    DEALER per peer incarnation  -- what this worker says to that peer; never read

The number of sockets follows the number of processes, never the number of requests. Nothing here blocks: a queue that
is full is an error the caller sees, so what was sent without one arrives as long as the connection lives.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from socket import socketpair

import zmq

from ..core.config import NetworkConfig
from ..core.errors import ConfigurationError
from ..core.messages import Hello, Message, NodeRef, WorkerInfo
from .beat_thread import BeatThread
from .keys import Authenticator, ClusterKeys
from .sockets import Socket, bind_router, dial, main_routing_id
from .wire import ANYONE, MAX_QUEUED_MESSAGES, Incoming, PeerUnreachable, decode, encode

__all__ = ["BeatThread", "Incoming", "PeerUnreachable", "WorkerChannels"]

logger = logging.getLogger(__name__)

MAX_POLLED = 4096  # messages one poll returns, so that the loop comes round
GOODBYE_LINGER_MS = 300  # how long the last words of a process may take
MAX_SOCKET_PATH = 107  # bytes of a unix socket's path: sockaddr_un on Linux (103 on macOS)


class WorkerChannels:
    """Sends to gateways and peers by NodeRef and returns what came in.

    `endpoints` is where peers reach this worker; `host_digest` is equal for workers of one host with one run directory.
    Raises ConfigurationError when an address cannot be bound.
    """

    def __init__(self, network: NetworkConfig, ref: NodeRef, keys: ClusterKeys) -> None:
        self._ref = ref
        self._keys = keys
        self.host_digest = _host_digest(network.run_dir, ref)
        self._context: zmq.Context[Socket] = zmq.Context()
        self._authenticator = Authenticator(self._context, keys)
        self._poller = zmq.Poller()
        self._woken, self._waker = socketpair()  # threads that want the loop's attention write a byte
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._poller.register(self._woken, zmq.POLLIN)
        self._routers: list[Socket] = []
        self._dealers: list[Socket] = []  # one per joined address
        self._gateways: dict[NodeRef, Socket] = {}  # gateway that said something |-> its DEALER
        self._peers: dict[NodeRef, tuple[WorkerInfo, Socket]] = {}
        self.num_dropped = 0  # frames that were no message for this incarnation, broadcasts a full queue refused
        try:
            self.endpoints = tuple(self._bind(network))
            for address in network.join:
                dealer = dial(self._context, address, keys, linger_ms=GOODBYE_LINGER_MS, queue=MAX_QUEUED_MESSAGES)
                self._dealers.append(dealer)
                dealer.routing_id = main_routing_id(ref)
                dealer.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(
                f"cannot join {', '.join(network.join)} or listen at {network.listen_host}: {error.strerror}; "
                "check --join and the listen address"
            ) from error
        except ConfigurationError:
            self.close()
            raise
        for socket in (*self._routers, *self._dealers):
            self._poller.register(socket, zmq.POLLIN)

    def _bind(self, network: NetworkConfig) -> Iterator[str]:
        if network.run_dir:
            path = Path(network.run_dir) / f"{self._ref.node_id}-{self._ref.incarnation:x}.sock"
            if len(os.fsencode(path)) > MAX_SOCKET_PATH:
                raise ConfigurationError(
                    f"the socket path {path} is longer than {MAX_SOCKET_PATH} bytes; choose a shorter run directory"
                )
            yield self._listen(f"ipc://{path}")
        yield self._listen(f"tcp://{network.listen_host}:*")

    def _listen(self, address: str) -> str:
        router, endpoint = bind_router(self._context, address, self._keys)
        self._routers.append(router)
        return endpoint

    # ---- in --------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[Incoming]:
        """All messages that are there now, in each sender's order; waits at most `timeout_s` while there is none."""
        received: list[Incoming] = []
        for socket, _ in self._poller.poll(round(timeout_s * 1000)):
            if isinstance(socket, int):
                self._woken.recv(MAX_POLLED)
                continue
            frames_before = 1 if socket in self._routers else 0  # a ROUTER puts the routing id in front
            while len(received) < MAX_POLLED:
                try:
                    parts = _receive(socket)
                except zmq.Again:
                    break
                incoming = self._decode(parts[frames_before:])
                if incoming is None:
                    self.num_dropped += 1
                    continue
                if not frames_before:
                    self._heard_from_gateway(incoming.sender, socket)
                received.append(incoming)
        return received

    def wake(self) -> None:
        """From any thread: `poll` returns at once, or the next one does."""
        with contextlib.suppress(OSError):  # full of bytes that wake it already, or closed
            self._waker.send(b"w")

    def _decode(self, parts: list[zmq.Frame]) -> Incoming | None:
        if not 1 <= len(parts) <= 2:
            return None
        envelope = decode(parts[0].bytes, self._ref)
        if envelope is None:
            return None
        return Incoming(envelope.sender, envelope.body, parts[1].buffer if len(parts) == 2 else None)

    def _heard_from_gateway(self, gateway: NodeRef, dealer: Socket) -> None:
        """Bind the gateway's present life to the DEALER its words came over; an earlier life there is gone."""
        if self._gateways.get(gateway) is not dealer:
            self._gateways = {ref: other for ref, other in self._gateways.items() if other is not dealer}
            self._gateways[gateway] = dealer

    # ---- out -------------------------------------------------------------------------------------------------

    def send(self, to: NodeRef, body: Message, payload: bytearray | None = None) -> None:
        """Queue a message; `payload` must not change any more. Raises PeerUnreachable when it was not queued."""
        socket = self._peers[to][1] if to in self._peers else self._gateways.get(to)
        if socket is None:
            raise PeerUnreachable(f"{to.node_id} is not known here (any more); it must join first")
        frames: list[bytes | bytearray] = [encode(self._ref, to.incarnation, body)]
        if payload is not None:
            frames.append(payload)
        try:
            socket.send_multipart(frames, zmq.NOBLOCK, copy=payload is None)
        except zmq.Again:
            raise PeerUnreachable(f"{to.node_id} does not read its messages; it hangs or its host is gone") from None

    def broadcast_gateways(self, body: Message) -> None:
        """Send to every gateway: a Hello to each joined address, anything else to those that have answered one.

        A gateway whose queue is full is left out (`num_dropped`): it is told again when it is back.
        """
        if isinstance(body, Hello):
            targets = [(ANYONE, dealer) for dealer in self._dealers]
        else:
            targets = [(gateway.incarnation, dealer) for gateway, dealer in self._gateways.items()]
        for incarnation, dealer in targets:
            try:
                dealer.send(encode(self._ref, incarnation, body), zmq.NOBLOCK)
            except zmq.Again:
                self.num_dropped += 1

    # ---- peers -----------------------------------------------------------------------------------------------

    def add_peer(self, info: WorkerInfo) -> None:
        """Connect to a worker a gateway introduced: ipc on one host with one run directory, else TCP with CURVE."""
        if info.ref in self._peers or info.ref == self._ref:
            return
        scheme = "ipc://" if info.host_digest == self.host_digest else "tcp://"
        address = next((endpoint for endpoint in info.endpoints if endpoint.startswith(scheme)), None)
        if address is None:
            logger.warning("%s names no %s endpoint; it cannot be reached from here", info.ref.node_id, scheme)
            return
        dealer = dial(self._context, address, self._keys, linger_ms=0, queue=MAX_QUEUED_MESSAGES)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            dealer.close()
            logger.warning("cannot connect to %s at %s: %s", info.ref.node_id, address, error.strerror)
            return
        self._peers[info.ref] = (info, dealer)

    def remove_peer(self, ref: NodeRef) -> None:
        """Close the connection to a peer that left; what it had not read is lost."""
        if ref in self._peers:
            self._peers.pop(ref)[1].close()

    def peer_info(self, ref: NodeRef) -> WorkerInfo:
        """What is known of a peer. Raises PeerUnreachable when it is not connected."""
        if ref not in self._peers:
            raise PeerUnreachable(f"{ref.node_id} is not known here (any more); it must join first")
        return self._peers[ref][0]

    def close(self) -> None:
        """Close every socket; the last words to gateways and peers have GOODBYE_LINGER_MS to leave."""
        peers = [dealer for _, dealer in self._peers.values()]
        for dealer in peers:
            if not dealer.closed:
                dealer.linger = GOODBYE_LINGER_MS  # a hand-over that ended here may still be on its way
        for socket in (*self._routers, *self._dealers, *peers):
            socket.close()
        self._woken.close()
        self._waker.close()
        self._context.term()
        self._authenticator.join()


def _receive(socket: Socket) -> list[zmq.Frame]:
    """One whole message without waiting. Raises zmq.Again when there is none."""
    return socket.recv_multipart(zmq.NOBLOCK, copy=False)


def _host_digest(run_dir: str, ref: NodeRef) -> str:
    """Equal for two workers exactly when they share a kernel and a run directory; without one it is unique."""
    if run_dir:
        directory = os.stat(run_dir)
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        identity = f"{boot_id} {directory.st_dev} {directory.st_ino}"
    else:
        identity = f"alone {ref.node_id} {ref.incarnation}"
    return hashlib.sha256(identity.encode()).hexdigest()[:32]
