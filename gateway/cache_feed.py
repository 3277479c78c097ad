"""CacheFeed: keeps the prefix index true to what workers say; notices lost updates and asks for the whole again."""

from collections.abc import Callable

from ..core.cache_events import Cleared
from ..core.messages import CacheSnapshot, CacheSnapshotQuery, CacheUpdate, Message, NodeRef, WorkerInfo
from ..radix_cache.index import PrefixIndexes

SNAPSHOT_TIMEOUT_S = 5.0


class CacheFeed:
    """Updates of one worker are numbered; after a gap nothing of it is believed until its snapshot is here."""

    def __init__(self, index: PrefixIndexes, send: Callable[[NodeRef, Message], bool]):
        self._index = index
        self._send = send
        self._next: dict[NodeRef, int | None] = {}  # worker |-> number of its next update; None: a snapshot is due
        self._asked: dict[NodeRef, float] = {}  # worker whose snapshot is due |-> when it was last asked for it

    def worker_joined(self, info: WorkerInfo) -> None:
        """It will send a snapshot by itself after its Welcome; until then nothing is known."""
        self._index.add_worker(info.ref.node_id, info.block_size)
        self._next[info.ref] = None

    def worker_left(self, info: WorkerInfo) -> None:
        self._index.remove_worker(info.ref.node_id)
        self._next.pop(info.ref, None)
        self._asked.pop(info.ref, None)

    def handle(self, sender: NodeRef, body: Message) -> None:
        match body:
            case CacheUpdate():
                self._update(sender, body)
            case CacheSnapshot():
                self._replace(sender, body)

    def tick(self, now: float) -> None:
        """Asks again for a snapshot that does not come: it, or the question, may have been lost."""
        for ref in [ref for ref, expected in self._next.items() if expected is None]:
            if now - self._asked.setdefault(ref, now) > SNAPSHOT_TIMEOUT_S:
                self._asked[ref] = now
                self._send(ref, CacheSnapshotQuery())

    def _update(self, sender: NodeRef, update: CacheUpdate) -> None:
        """Updates that come while a snapshot is due are in the snapshot, or come again as a gap after it."""
        expected = self._next.get(sender)
        if expected is None:
            return
        if update.sequence > expected:
            self._next[sender] = None
            self._send(sender, CacheSnapshotQuery())
        elif update.sequence == expected:
            for event in update.events:
                self._index.apply(sender.node_id, event)
            self._next[sender] = expected + 1

    def _replace(self, sender: NodeRef, snapshot: CacheSnapshot) -> None:
        """The whole of what the worker caches replaces what was known of it."""
        if sender not in self._next:
            return
        self._index.apply(sender.node_id, Cleared())
        for event in snapshot.events:
            self._index.apply(sender.node_id, event)
        self._next[sender] = snapshot.sequence + 1
        self._asked.pop(sender, None)
