"""SimNetwork: messages and hand-overs between simulated processes, each message a fixed time on its way."""

from collections.abc import Callable

from ..core.messages import Message, NodeRef
from .clock import VirtualClock
from .handover import Handover, LinkSpeed, Wire

Handle = Callable[[NodeRef, Message], None]


class SimNetwork:
    """Every process registers what takes its messages. Between two processes messages keep their order."""

    def __init__(self, clock: VirtualClock, speed: LinkSpeed, message_s: float):
        self._clock = clock
        self._speed = speed
        self._message_s = message_s
        self._handlers: dict[NodeRef, Handle] = {}
        self._wires: dict[NodeRef, Wire] = {}
        self._handovers: dict[str, Handover] = {}

    def join(self, ref: NodeRef, handle: Handle) -> None:
        self._handlers[ref] = handle
        self._wires[ref] = Wire(self._speed)

    def knows(self, ref: NodeRef | None) -> bool:
        return ref in self._handlers

    def send(self, sender: NodeRef, receiver: NodeRef, message: Message) -> None:
        handle = self._handlers[receiver]
        self._clock.after(self._message_s, lambda: handle(sender, message))

    def later(self, action: Callable[[], None]) -> None:
        """What a message would cause whose content does not matter."""
        self._clock.after(self._message_s, action)

    def wire(self, ref: NodeRef) -> Wire:
        """What this worker sends KV over."""
        return self._wires[ref]

    def handover(self, handover_id: str) -> Handover:
        """Made when either end first asks for it."""
        if handover_id not in self._handovers:
            self._handovers[handover_id] = Handover(self._clock, handover_id)
        return self._handovers[handover_id]

    def drop_handover(self, handover_id: str) -> None:
        """It is over, or aborted by either end; harmless when it is not known."""
        if (handover := self._handovers.pop(handover_id, None)) is not None:
            handover.abort()

    @property
    def num_handovers(self) -> int:
        return len(self._handovers)

    @property
    def num_kv_bytes(self) -> int:
        return sum(wire.bytes_sent for wire in self._wires.values())
