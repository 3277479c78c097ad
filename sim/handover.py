"""KV on its way between two workers: when pieces may leave, how long the wire is busy, when the last one is there.

As in transfer/: pieces leave once the receiver has granted blocks, chunk by chunk while the next chunk computes, and
the layers that a running step has behind it may leave before the step is over. The hand-over counts tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .clock import VirtualClock


@dataclass(frozen=True)
class LinkSpeed:
    """From one worker to its peers. `num_layers` 1: a piece leaves only when all of its layers are computed."""

    bytes_per_token: int
    bytes_per_s: float
    latency_s: float
    num_layers: int


class Wire:
    """All that one worker sends goes over it, one piece after the other."""

    def __init__(self, speed: LinkSpeed):
        self.bytes_sent = 0
        self._speed = speed
        self._free_at = 0.0

    def send(self, num_tokens: int, began: float, now: float) -> float:
        """When the KV of `num_tokens` is there. It was computed from `began` until now (or lay there: began = now)."""
        num_bytes = num_tokens * self._speed.bytes_per_token
        self.bytes_sent += num_bytes
        seconds = num_bytes / self._speed.bytes_per_s
        first_layer_at = began + (now - began) / self._speed.num_layers
        done = max(self._free_at, first_layer_at) + seconds
        self._free_at = max(done, now + seconds / self._speed.num_layers)  # the last layer leaves after the step
        return self._free_at + self._speed.latency_s


class Handover:
    """One prompt's KV. Either end may be first; nothing moves before both are there."""

    def __init__(self, clock: VirtualClock, request_id: str):
        self.request_id = request_id
        self.num_cached_tokens = 0  # of the prompt, found by the sender in its own cache: the commit tells
        self._clock = clock
        self._wire: Wire | None = None
        self._num_tokens = 0
        self._on_sent: Callable[[], None] = _nothing
        self._on_granted: Callable[[], None] = _nothing
        self._on_arrived: Callable[[], None] | None = None
        self._num_computed = 0
        self._num_gone = 0  # tokens sent, or there before
        self._has_ended = False

    def open_sender(
        self, wire: Wire, num_tokens: int, on_sent: Callable[[], None], on_granted: Callable[[], None] | None = None
    ) -> None:
        """`on_sent`: all has left and arrived; the sender's blocks are its own again. `on_granted`: it may send."""
        self._wire, self._num_tokens, self._on_sent = wire, num_tokens, on_sent
        self._on_granted = on_granted or _nothing

    def open_receiver(self, first_missing_token: int, on_arrived: Callable[[], None]) -> None:
        """The receiver has blocks, and all tokens before that one."""
        self._num_gone, self._on_arrived = first_missing_token, on_arrived
        self._on_granted()
        self._move(self._clock.now)

    @property
    def is_granted(self) -> bool:
        """The receiver has blocks for it."""
        return self._on_arrived is not None

    def computed(self, num_tokens: int, began: float) -> None:
        """So many tokens of the prompt are computed now; the last of them since `began`."""
        self._num_computed = num_tokens
        self._move(began)

    def abort(self) -> None:
        """Nothing more happens, to neither end."""
        self._has_ended = True

    def _move(self, began: float) -> None:
        if self._wire is None or self._on_arrived is None or self._has_ended:
            return
        is_complete = self._num_computed == self._num_tokens
        num_new = max(self._num_computed - self._num_gone, 0)
        if not num_new and not is_complete:
            return
        self._num_gone += num_new
        arrives_at = self._wire.send(num_new, began, self._clock.now)
        if is_complete:
            self._clock.at(arrives_at, self._end)

    def _end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        assert self._on_arrived is not None
        self._on_arrived()
        self._on_sent()


def _nothing() -> None:
    """Nobody waits."""
