"""What a step is while the device works on it: its progress through the layers, tokens that are being sampled, and
log-probabilities on their way.

On the CPU everything is over when a launch returns; the same calls then answer at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..core.request import TokenLogprobs


class Event(Protocol):
    """A point in the device's work."""

    def query(self) -> bool:
        """Whether the device has come past it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class _Past:
    """The event of a device that has finished whatever it was given: the CPU."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def record_event(device: torch.device) -> Event:
    """An event behind all that has been launched on the current stream so far."""
    if device.type != "cuda":
        return _Past()
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class LaunchedLogprobs:
    """Log-probabilities of n rows, on the host once the event has passed."""

    chosen: Tensor  # [n] float32
    top: Tensor  # [n, k] float32
    top_ids: Tensor  # [n, k] int64
    num_top: Sequence[int]  # [n]: how many of the k each row has asked for
    event: Event

    def read(self) -> list[TokenLogprobs]:
        """One for each row, waiting for the device."""
        self.event.synchronize()
        rows = zip(self.chosen.tolist(), self.top.tolist(), self.top_ids.tolist(), self.num_top, strict=True)
        return [TokenLogprobs(chosen, tuple(zip(ids[:k], top[:k], strict=True))) for chosen, top, ids, k in rows]


class LaunchedTokens(Protocol):
    """What the sampler is computing for the rows of one step."""

    def is_done(self) -> bool: ...

    def token_ids(self) -> list[int | None]:
        """One token per row, waiting for the device; None for a row whose logits have no finite maximum."""

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Row |-> what the model thought of its token, waiting for the device; only for rows that ask."""


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """Of those rows of a step that ask."""

    rows: Sequence[int]
    launched: LaunchedLogprobs

    def read(self) -> dict[int, TokenLogprobs]:
        return dict(zip(self.rows, self.launched.read(), strict=True))


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """LaunchedTokens of the CPU."""

    values: list[int | None]
    asked: AskedLogprobs | None = None

    def is_done(self) -> bool:
        return True

    def token_ids(self) -> list[int | None]:
        return list(self.values)

    def logprobs(self) -> dict[int, TokenLogprobs]:
        return {} if self.asked is None else self.asked.read()


@dataclass(frozen=True, slots=True)
class ArrivingTokens:
    """LaunchedTokens of a device: copied to `values` `[n]` on the host, complete when the event has passed."""

    values: Tensor  # -1: no token
    event: Event
    asked: AskedLogprobs | None = None

    def is_done(self) -> bool:
        return self.event.query()

    def token_ids(self) -> list[int | None]:
        self.event.synchronize()
        return [token if token >= 0 else None for token in self.values.tolist()]

    def logprobs(self) -> dict[int, TokenLogprobs]:
        return {} if self.asked is None else self.asked.read()


@dataclass(frozen=True, slots=True)
class LayerProgress:
    """How far a step has come. `marks`: (layers behind it, event), in their order; the last one is the step's end."""

    marks: Sequence[tuple[int, Event]]

    def layers_done(self) -> int:
        """Layers whose keys and values are in the cache."""
        done = 0
        for layers, event in self.marks:
            if not event.query():
                break
            done = layers
        return done

    def is_done(self) -> bool:
        return self.marks[-1][1].query()

    def wait(self) -> None:
        self.marks[-1][1].synchronize()
