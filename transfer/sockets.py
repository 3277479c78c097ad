"""The two kinds of ZeroMQ socket Baton uses, with the same bounds everywhere and CURVE on every TCP one."""

import zmq

from ..core.messages import MAX_FRAME_BYTES, NodeRef
from .keys import ClusterKeys, secure_client, secure_server
from .wire import MAX_QUEUED_MESSAGES

Socket = zmq.Socket[bytes]


def main_routing_id(ref: NodeRef) -> bytes:
    """The routing id of a worker's main DEALER: a gateway that came back can say WhoAreYou before any Hello."""
    return f"{ref.node_id}/{ref.incarnation:x}".encode()


def dial(context: "zmq.Context[Socket]", address: str, keys: ClusterKeys, *, linger_ms: int, queue: int) -> Socket:
    """A DEALER that connects to `address` now or later, with CURVE on TCP and bounded queues."""
    socket = context.socket(zmq.DEALER)
    socket.linger = linger_ms
    socket.set_hwm(queue)
    socket.maxmsgsize = MAX_FRAME_BYTES
    if address.startswith("tcp://"):
        secure_client(socket, keys)
        socket.heartbeat_ivl, socket.heartbeat_timeout = 5_000, 15_000  # notices a host that vanished
    return socket


def bind_router(context: "zmq.Context[Socket]", address: str, keys: ClusterKeys) -> tuple[Socket, str]:
    """A ROUTER that listens at `address` and the address it got (a TCP port of 0 or * becomes a real one).

    It reports what it cannot deliver instead of dropping it (ROUTER_MANDATORY), and a peer that reconnects under its
    routing id replaces its dead connection. Raises zmq.ZMQError when the address cannot be bound.
    """
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.set_hwm(MAX_QUEUED_MESSAGES)
    router.maxmsgsize = MAX_FRAME_BYTES
    router.router_mandatory = True
    router.router_handover = True
    if address.startswith("tcp://"):
        secure_server(router, keys)
    try:
        router.bind(address)
    except zmq.ZMQError:
        router.close()
        raise
    return router, router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
