"""BeatThread: tells every gateway once a second that this process lives, whatever its main loop is doing."""

import threading
from collections.abc import Callable

import zmq

from ..core.config import NetworkConfig
from ..core.messages import Beat, NodeRef
from .keys import ClusterKeys
from .sockets import Socket, dial
from .wire import ANYONE, encode

BEAT_INTERVAL_S = 1.0
MAX_QUEUED_BEATS = 2  # an old beat tells nothing: a gateway that is away does not collect them


class BeatThread:
    """Sockets of its own, so it shares nothing with the loop but `num_steps`, which it only reads.

    Beats are meant for whoever listens at the address: a gateway that came back learns of this worker by them and asks
    who it is.
    """

    def __init__(self, network: NetworkConfig, ref: NodeRef, keys: ClusterKeys, num_steps: Callable[[], int]) -> None:
        self._addresses = network.join
        self._ref = ref
        self._keys = keys
        self._num_steps = num_steps
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Wake the thread, let it close its sockets, and wait for it. Harmless before start and when repeated."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        context: zmq.Context[Socket] = zmq.Context()
        dealers = []
        for address in self._addresses:
            dealer = dial(context, address, self._keys, linger_ms=0, queue=MAX_QUEUED_BEATS)
            dealer.connect(address)
            dealers.append(dealer)
        sequence = 0
        while not self._stopping.wait(BEAT_INTERVAL_S):
            sequence += 1
            frame = encode(self._ref, ANYONE, Beat(sequence, self._num_steps()))
            for dealer in dealers:
                if dealer.poll(0, zmq.POLLOUT):
                    dealer.send(frame, zmq.NOBLOCK)
        for dealer in dealers:
            dealer.close()
        context.term()
