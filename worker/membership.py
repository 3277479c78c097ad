"""What a worker knows of gateways and peers. Pure: messages and the time come in, changes come out."""

from dataclasses import dataclass

from ..core.messages import NodeRef, PeerJoined, PeerLeft, Welcome, WorkerInfo

GATEWAY_SILENCE_S = 10.0  # ten missed beats


@dataclass(frozen=True)
class Changes:
    """What follows from a message: peers and gateways that are new or gone.

    `welcomed_by` has taken this worker into its table, for the first time or again, and knows nothing of it yet.
    """

    joined: tuple[WorkerInfo, ...] = ()
    left: tuple[NodeRef, ...] = ()
    welcomed_by: NodeRef | None = None
    lost_gateways: tuple[NodeRef, ...] = ()


class Membership:
    """The gateways that said Welcome and the peers they introduced.

    A gateway that is silent or came back as another incarnation is lost: its requests have no reader any more. One that
    was only silent is back with its next message: it may never have missed this worker, so no Welcome would come. Peers
    outlive the gateway that introduced them; they go when a gateway says so or when they come back as another life.
    """

    def __init__(self) -> None:
        self._heard: dict[NodeRef, float] = {}  # gateway |-> when it was last heard
        self._silent: set[NodeRef] = set()  # gateways lost by silence
        self._peers: dict[str, WorkerInfo] = {}  # worker id |-> its present life

    @property
    def peers(self) -> list[WorkerInfo]:
        return list(self._peers.values())

    def knows(self, ref: NodeRef | None) -> bool:
        """Is this peer introduced and not gone?"""
        return ref is not None and ref.node_id in self._peers and self._peers[ref.node_id].ref == ref

    def is_gateway(self, ref: NodeRef) -> bool:
        return ref in self._heard

    def handle(self, sender: NodeRef, body: object, now: float) -> Changes:
        if sender in self._heard or sender in self._silent:
            self._silent.discard(sender)
            self._heard[sender] = now
        match body:
            case Welcome(gateway=gateway, peers=peers):
                lost = tuple(g for g in self._heard if g.node_id == gateway.node_id and g != gateway)
                for old in lost:
                    del self._heard[old]
                self._silent = {g for g in self._silent if g.node_id != gateway.node_id}
                self._heard[gateway] = now
                joined, left = self._introduce(peers)
                return Changes(joined, left, gateway, lost)
            case PeerJoined(info=info):
                joined, left = self._introduce([info])
                return Changes(joined, left)
            case PeerLeft(ref=ref) if self.knows(ref):
                del self._peers[ref.node_id]
                return Changes(left=(ref,))
            case _:
                return Changes()

    def expire(self, now: float) -> Changes:
        """Gateways that were silent for too long."""
        lost = tuple(g for g, heard in self._heard.items() if now - heard > GATEWAY_SILENCE_S)
        for gateway in lost:
            del self._heard[gateway]
        self._silent.update(lost)
        return Changes(lost_gateways=lost)

    def _introduce(self, infos: list[WorkerInfo]) -> tuple[tuple[WorkerInfo, ...], tuple[NodeRef, ...]]:
        joined, left = [], []
        for info in infos:
            known = self._peers.get(info.ref.node_id)
            if known == info:
                continue
            if known is not None:
                left.append(known.ref)
            self._peers[info.ref.node_id] = info
            joined.append(info)
        return tuple(joined), tuple(left)
