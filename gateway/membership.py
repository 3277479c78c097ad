"""Who is in the fleet, as this gateway knows it. Pure: messages and the time come in, actions come out.

The table is the registry: a worker is in it from its Hello until its Goodbye, its silence, or the Hello of its next
life. Peers learn of each other only through the messages this module asks to be sent.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from ..core.messages import (
    Beat,
    Message,
    NodeRef,
    PeerJoined,
    PeerLeft,
    Refused,
    Role,
    Status,
    Tuned,
    Welcome,
    WhoAreYou,
    WorkerInfo,
)
from ..core.tuner_event import TunerEvent

_REMEMBERED_LIVES = 256
_REMEMBERED_TUNER_EVENTS = 50  # of each worker


class Send(msgspec.Struct, frozen=True):
    """Send `message` to `to`."""

    to: NodeRef
    message: Message


class Joined(msgspec.Struct, frozen=True):
    """A worker is in the table now."""

    info: WorkerInfo


class Left(msgspec.Struct, frozen=True):
    """A worker is gone, for `reason`; nothing more can be sent to it."""

    info: WorkerInfo
    reason: str


class Rejected(msgspec.Struct, frozen=True):
    """A process was told that it does not fit; nothing more is to be sent to it."""

    ref: NodeRef
    reason: str


Action = Send | Joined | Left | Rejected


@dataclass
class Worker:
    """One life of one worker."""

    info: WorkerInfo
    last_heard: float
    status: Status | None = None
    num_steps: int = 0
    num_tuner_events: int = 0
    tuner_events: deque[TunerEvent] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_TUNER_EVENTS))

    @property
    def roles(self) -> tuple[Role, ...]:
        """What it may be given requests for now, as it last said."""
        return self.status.roles if self.status is not None and self.status.roles else self.info.roles

    @property
    def pool_tokens(self) -> int:
        """Tokens its KV pool holds."""
        return self.info.num_blocks * self.info.block_size


@dataclass
class Membership:
    """`model_digest` "" accepts whatever model the first worker has. `timeout_s`: silence that means death."""

    gateway: NodeRef
    model_digest: str
    timeout_s: float
    workers: dict[NodeRef, Worker] = field(default_factory=dict)
    _past_lives: deque[NodeRef] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_LIVES))

    def with_role(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers.values() if role in worker.roles]

    def hello(self, info: WorkerInfo, now: float) -> list[Action]:
        """A process introduces itself; once more after a WhoAreYou, or when it lost its connection."""
        ref = info.ref
        if reason := self._misfit(info):
            return [Send(ref, Refused(reason)), Rejected(ref, reason)]
        if ref in self.workers:
            self.workers[ref].last_heard = now
            return [self._welcome(ref)]
        actions: list[Action] = []
        for old in [r for r in self.workers if r.node_id == ref.node_id]:
            self._past_lives.append(old)
            actions += self._remove(old, "it was started anew")
        self.workers[ref] = Worker(info, now)
        actions += [self._welcome(ref), *self._to_others(ref, PeerJoined(info)), Joined(info)]
        return actions

    def heard(self, sender: NodeRef, body: Message, now: float) -> list[Action]:
        """Any other message. One of a worker that is not in the table asks it to introduce itself (again)."""
        worker = self.workers.get(sender)
        if worker is None:
            return [Send(sender, WhoAreYou())] if isinstance(body, Beat) else []
        worker.last_heard = now
        match body:
            case Beat(num_steps=num_steps):
                worker.num_steps = num_steps
            case Status():
                worker.status = body
            case Tuned(events=events):
                worker.num_tuner_events += len(events)
                # By this clock: the times of workers on other hosts say nothing here.
                worker.tuner_events.extend(msgspec.structs.replace(event, at=now) for event in events)
        return []

    def goodbye(self, sender: NodeRef) -> list[Action]:
        return self._remove(sender, "it said goodbye")

    def unreachable(self, ref: NodeRef, reason: str) -> list[Action]:
        """A message could not be sent to it: it is as good as gone. Should it live, its next beat brings it back."""
        return self._remove(ref, reason)

    def expire(self, now: float) -> list[Action]:
        """Workers that were silent for too long."""
        silent = [ref for ref, worker in self.workers.items() if now - worker.last_heard > self.timeout_s]
        return [a for ref in silent for a in self._remove(ref, f"it was silent for {self.timeout_s:g} s")]

    def _remove(self, ref: NodeRef, reason: str) -> list[Action]:
        worker = self.workers.pop(ref, None)
        if worker is None:
            return []
        return [*self._to_others(ref, PeerLeft(ref)), Left(worker.info, reason)]

    def _welcome(self, ref: NodeRef) -> Send:
        return Send(ref, Welcome(self.gateway, [w.info for r, w in self.workers.items() if r != ref]))

    def _to_others(self, ref: NodeRef, message: Message) -> list[Send]:
        return [Send(other, message) for other in self.workers if other != ref]

    def _misfit(self, info: WorkerInfo) -> str:
        """Why this worker cannot join; empty when it can."""
        ref = info.ref
        if ref in self._past_lives:
            return f"a newer process has the name {ref.node_id}; give this one another name"
        others = [worker.info for other, worker in self.workers.items() if other.node_id != ref.node_id]
        model_digest = self.model_digest or next((other.model_digest for other in others), info.model_digest)
        if info.model_digest != model_digest:
            return (
                f"it has other weights, another dtype or another tokenizer (digest {info.model_digest[:16]!r}, here "
                f"{model_digest[:16]!r}); start it with the same model and --dtype as the gateway"
            )
        wire_digest = next((other.wire_digest for other in others), info.wire_digest)
        if info.wire_digest != wire_digest:
            return (
                f"its KV cache has the layout {info.wire_digest[:64]!r}, the others have {wire_digest[:64]!r}; "
                "start it with the same model and --dtype"
            )
        return ""
