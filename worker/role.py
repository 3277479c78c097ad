"""What a role is: a part of a worker that takes requests, plans forward passes and collects their results."""

from typing import Protocol

from ..core.messages import NodeRef
from ..transfer.channels import Incoming
from ..transfer.link import LinkEvent


class WorkerRole(Protocol):
    """PrefillRole and DecodeRole. All calls come from the worker's one loop; none of them blocks on I/O."""

    @property
    def num_requests(self) -> int:
        """Requests known in any phase."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting_tokens(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def settings(self) -> dict[str, int]:
        """What its tuner moves, by the names of TunerEvent."""

    def handle(self, incoming: Incoming, now: float) -> None:
        """Take a message from a gateway; one that is another role's is ignored."""

    def on_link_event(self, event: LinkEvent, now: float) -> None:
        """A hand-over of one of this role's requests moved on or failed; others are ignored."""

    def step(self, now: float) -> bool:
        """One plan, launch, collect. False when there was nothing to compute."""

    def gateway_lost(self, gateway: NodeRef) -> None:
        """Nobody reads the answers to this gateway's requests any more: drop them."""

    def drain(self) -> None:
        """Refuse new requests from now on."""
