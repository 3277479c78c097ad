"""GatewayChannel: where workers join a gateway. Runs inside its event loop (asyncio or uvloop) and never blocks it.

The sockets are plain ones watched through their file descriptor. That descriptor only tells of *changes*, and any call
on the socket may use one up, so every wake-up and every send looks at the socket itself again.
"""

import asyncio
from collections import OrderedDict, deque

import zmq

from ..core.errors import ConfigurationError
from ..core.messages import Hello, Message, NodeRef
from .keys import Authenticator, ClusterKeys
from .sockets import Socket, bind_router, main_routing_id
from .wire import Incoming, PeerUnreachable, decode, encode

# Messages taken off the sockets before other tasks have their turn; the rest waits in ZeroMQ, bounded there. One may
# have the tokens of a whole step.
MAX_RECEIVED = 128
MAX_STRANGERS = 256


class GatewayChannel:
    """ROUTERs at the given addresses; `addresses` has them with their real TCP ports.

    Only a Hello binds a worker's NodeRef to a connection, and a later Hello binds it anew. `send` to a worker that was
    heard but never said Hello reaches it at its well-known routing id: that is for WhoAreYou. Build it inside a running
    event loop. Raises ConfigurationError when an address cannot be bound.
    """

    def __init__(self, bind: tuple[str, ...], ref: NodeRef, keys: ClusterKeys) -> None:
        self._ref = ref
        self._context: zmq.Context[Socket] = zmq.Context()
        self._authenticator = Authenticator(self._context, keys)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._received: deque[Incoming] = deque()
        self._routers: list[Socket] = []
        self._monitors: list[Socket] = []
        self._routes: dict[NodeRef, tuple[Socket, bytes]] = {}  # worker that said Hello |-> its connection
        self._strangers: OrderedDict[NodeRef, Socket] = OrderedDict()  # heard without a Hello |-> where
        self.disconnected = asyncio.Event()  # set when a connection has ended: `send` tells whose. The reader clears it
        self.num_dropped = 0  # frames that were no message for this incarnation
        addresses = []
        for address in bind:
            try:
                router, real_address = bind_router(self._context, address, keys)
            except zmq.ZMQError as error:
                self.close()
                raise ConfigurationError(
                    f"workers cannot join at {address}: {error.strerror}; choose another address or port"
                ) from error
            self._routers.append(router)
            self._loop.add_reader(router.fileno(), self._on_change, router)
            self._watch(router)
            addresses.append(real_address)
        self.addresses = tuple(addresses)

    async def receive(self) -> Incoming:
        """The next message. One task at a time."""
        while not self._received:
            self._changed.clear()
            self._take()
            if self._received:
                await asyncio.sleep(0)  # or a constant stream of messages would let no other task run
            else:
                await self._changed.wait()
        return self._received.popleft()

    def send(self, to: NodeRef, body: Message) -> None:
        """Queue a message without waiting. Raises PeerUnreachable when it was not queued."""
        if to in self._routes:
            router, routing_id = self._routes[to]
        elif to in self._strangers:
            router, routing_id = self._strangers[to], main_routing_id(to)
        else:
            raise PeerUnreachable(f"{to.node_id} has not joined this gateway; it must say Hello first")
        try:
            router.send_multipart([routing_id, encode(self._ref, to.incarnation, body)], zmq.NOBLOCK)
        except zmq.Again:
            raise PeerUnreachable(f"{to.node_id} does not read its messages; it hangs or its host is gone") from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerUnreachable(f"{to.node_id} has no connection to this gateway; it ended or reconnects") from None
        finally:
            self._changed.set()  # the call may have used up the sign that something came in

    def forget(self, ref: NodeRef) -> None:
        """Drop the route to a worker that is gone."""
        self._routes.pop(ref, None)
        self._strangers.pop(ref, None)

    def close(self) -> None:
        """Stop watching and close every socket."""
        for router in self._routers:
            self._loop.remove_reader(router.fileno())
            router.disable_monitor()
            router.close()
        for monitor in self._monitors:
            self._loop.remove_reader(monitor.fileno())
            monitor.close()
        self._context.term()
        self._authenticator.join()

    # ---- in --------------------------------------------------------------------------------------------------

    def _watch(self, router: Socket) -> None:
        """A killed process of this host is known at once by its connection, long before its silence is."""
        monitor = router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitors.append(monitor)
        self._loop.add_reader(monitor.fileno(), self._on_disconnect, monitor)
        self._on_disconnect(monitor)  # its descriptor tells of nothing before the socket was looked at once

    def _on_disconnect(self, monitor: Socket) -> None:
        while int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            monitor.recv_multipart(zmq.NOBLOCK)  # a connection has no name there
            self.disconnected.set()

    def _on_change(self, router: Socket) -> None:
        router.getsockopt(zmq.EVENTS)  # acknowledges the change, or the event loop would call here without end
        self._changed.set()

    def _take(self) -> None:
        for router in self._routers:
            while len(self._received) < MAX_RECEIVED:
                try:
                    routing_id, *frames = router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._accept(router, routing_id, frames)

    def _accept(self, router: Socket, routing_id: bytes, frames: list[bytes]) -> None:
        envelope = decode(frames[0], self._ref) if len(frames) == 1 else None
        if envelope is None:
            self.num_dropped += 1
            return
        sender = envelope.sender
        if isinstance(envelope.body, Hello):
            self._routes[sender] = (router, routing_id)
            self._strangers.pop(sender, None)
        elif sender not in self._routes:
            self._strangers[sender] = router
            if len(self._strangers) > MAX_STRANGERS:
                self._strangers.popitem(last=False)
        self._received.append(Incoming(sender, envelope.body))
