"""Tells the gateways what the radix tree holds: numbered updates, and a snapshot to whoever asks or is new."""

from ..core.messages import CacheSnapshot, CacheUpdate
from ..radix_cache.cache import RadixCache
from ..transfer.channels import WorkerChannels


class CacheReporter:
    def __init__(self, cache: RadixCache, channels: WorkerChannels):
        self._cache = cache
        self._channels = channels
        self._sequence = 0

    def report(self) -> None:
        """Send what changed since the last report, if anything did, to every gateway."""
        events = self._cache.drain_events()
        if events:
            self._sequence += 1
            self._channels.broadcast_gateways(CacheUpdate(self._sequence, events))

    def snapshot(self) -> CacheSnapshot:
        """The whole tree. What changed before it is reported first, so the next update follows it without a gap."""
        self.report()
        return CacheSnapshot(self._sequence, list(self._cache.snapshot()))
