"""Loads: what the router's own choices have put on each worker and is not done yet. Pure; the time comes in.

A worker is taken to have computed prompts since it got the first of them, or since the last one was done; interactive
ones not before the first of those came, for that put batch ones aside. When a first token arrives, the prompt itself
was ready a little before (`lag_s`), and the next one has been computed from then on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..core.messages import NodeRef
from .forecast import Work

SEQUENCE_WEIGHT = 64  # tokens of prompt whose computing slows a worker about as much as one running sequence

_NONE = Work()


@dataclass
class Load:
    """Of one worker. Batch prompts are computed from what interactive ones leave, so they do not delay those."""

    missing_tokens: int = 0  # of prompts that were sent there, whether it computes or receives them
    sequences: int = 0  # that it generates for
    prompting: int = 0  # of them without a first token yet
    context: int = 0  # their prompt tokens
    prompts: int = 0  # that it computes
    interactive: Work = _NONE
    batch: Work = _NONE
    busy_since: float = 0.0
    works: list[Work] = field(default_factory=list)  # of those prompts

    @property
    def tokens(self) -> int:
        return self.missing_tokens + SEQUENCE_WEIGHT * self.sequences

    @property
    def decoding(self) -> int:
        return self.sequences - self.prompting

    def backlog(self, *, is_batch: bool) -> Work:
        """What is computed before a newcomer."""
        return self.interactive + self.batch if is_batch else self.interactive

    def elapsed_s(self, now: float) -> float:
        return max(now - self.busy_since, 0.0) if self.prompts else 0.0

    @property
    def longest(self) -> Work:
        return max(self.works, key=lambda work: work.num_tokens, default=_NONE)

    def add(self, work: Work, now: float, *, is_batch: bool) -> None:
        """It has to compute that."""
        if not self.prompts or not (is_batch or self.interactive.num_tokens):
            self.busy_since = now
        self.prompts += 1
        self.works.append(work)
        if is_batch:
            self.batch += work
        else:
            self.interactive += work

    def remove(self, work: Work, done_at: float, *, is_batch: bool) -> None:
        """It has computed that, or need not any more."""
        self.prompts -= 1
        self.works.remove(work)
        self.busy_since = max(self.busy_since, done_at)
        if is_batch:
            self.batch -= work
        else:
            self.interactive -= work


NO_LOAD = Load()


class Loads:
    """By worker; one without load is not kept."""

    def __init__(self) -> None:
        self._loads: dict[NodeRef, Load] = {}

    def __getitem__(self, ref: NodeRef) -> Load:
        """To read only."""
        return self._loads.get(ref, NO_LOAD)

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads.values())

    def __len__(self) -> int:
        return len(self._loads)

    def of(self, ref: NodeRef) -> Load:
        """To raise."""
        return self._loads.setdefault(ref, Load())

    def known(self, ref: NodeRef) -> Load | None:
        """To lower; None: the worker has gone in the meantime. Then `tidy`."""
        return self._loads.get(ref)

    def tidy(self, ref: NodeRef) -> None:
        load = self._loads.get(ref)
        if load is not None and not (load.missing_tokens or load.sequences or load.prompts):
            del self._loads[ref]

    def forget(self, ref: NodeRef) -> None:
        self._loads.pop(ref, None)
