"""Ledger: who owns the blocks of one worker."""

import msgspec


class Ledger(msgspec.Struct, frozen=True):
    """The five states add up to `total`; the counts stand beside them."""

    total: int
    free: int
    reserved: int
    private: int
    cached: int
    quarantined: int
    locks: int  # prefix handles not yet released
    requests: int  # requests the worker knows in any phase
    senders: int  # hand-overs going out
    receivers: int  # hand-overs coming in
    ring_slots_in_use: int

    @property
    def idle(self) -> bool:
        owned = self.reserved + self.private + self.quarantined
        counts = self.locks + self.requests + self.senders + self.receivers + self.ring_slots_in_use
        return self.free + self.cached == self.total and owned == 0 and counts == 0
