"""Which requests come when: recorded traces under a load of one's choice, and synthetic ones.

Prompts are made when they arrive and are cheap: of a block of 512 tokens with one hash id only the first token is its
own, the others are all alike. Two prompts share exactly the blocks whose ids they share, and nothing of a prompt
without ids is anybody else's.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ..core.request import Urgency
from ..core.trace import TRACE_BLOCK_SIZE, TraceRow, scaled_arrivals
from .answers import FILLER_TOKEN

_HASHED = 1 << 29  # token ids from here on begin blocks with a hash id
_UNIQUE = 1 << 30  # and from here on what only one request has
NORMAL = Urgency()
_FILLER = [FILLER_TOKEN] * TRACE_BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class SimRequest:
    """`index` numbers the requests of a run. `output_tokens`: where the model stops, at most `max_tokens`."""

    index: int
    arrival_s: float
    num_prompt_tokens: int
    output_tokens: int
    max_tokens: int
    hash_ids: tuple[int, ...] = ()
    urgency: Urgency = NORMAL

    def prompt_token_ids(self) -> list[int]:
        token_ids: list[int] = []
        for hash_id in self.hash_ids:
            token_ids += _FILLER
            token_ids[-TRACE_BLOCK_SIZE] = _HASHED + hash_id % _HASHED
        del token_ids[self.num_prompt_tokens :]
        num_missing = self.num_prompt_tokens - len(token_ids)
        if num_missing:
            token_ids += [FILLER_TOKEN] * num_missing
            token_ids[-num_missing] = _UNIQUE + self.index
        return token_ids


@dataclass(frozen=True)
class LoadStep:
    """So many requests a second, on average, for so long."""

    rate: float
    duration_s: float


def trace_requests(
    rows: Sequence[TraceRow],
    rate: float | None = None,
    max_tokens: int | None = None,
    jitter_s: float = 0.0,
    seed: int = 0,
) -> list[SimRequest]:
    """The rows of a trace, their times stretched to `rate` requests a second; see `scaled_arrivals`.

    `max_tokens` is what clients ask for; None: exactly as long as the answer will be. `jitter_s` (before the
    stretching) spreads the requests of one tick of a coarse trace.
    """
    times = _spread([row.timestamp / 1000 for row in rows], jitter_s, seed)
    return _requests(rows, scaled_arrivals(times, rate), max_tokens)


def stepped_requests(
    rows: Sequence[TraceRow],
    steps: Sequence[LoadStep],
    max_tokens: int | None = None,
    jitter_s: float = 0.0,
    seed: int = 0,
) -> list[SimRequest]:
    """The rows of a trace under a load that changes in steps, each with exactly its average rate: as many of the rows
    that are next are stretched to its duration as it takes. Bursts keep their shape.

    A trace that is too short starts again, with contents of its own.
    """
    times = _spread([row.timestamp / 1000 for row in rows], jitter_s, seed)
    span_s = (times[-1] - times[0]) * len(rows) / max(len(rows) - 1, 1)  # a gap after the last one too
    chosen: list[TraceRow] = []
    arrivals: list[float] = []
    began, position = 0.0, 0  # of the step; in the trace, which may be gone through several times

    def time_of(position: int) -> float:
        lap, index = divmod(position, len(rows))
        return lap * span_s + times[index]

    for step in steps:
        end = position + round(step.rate * step.duration_s)
        factor = step.duration_s / max(time_of(end) - time_of(position), 1e-9)
        for place in range(position, end):
            lap, index = divmod(place, len(rows))
            chosen.append(_of_lap(rows[index], lap))
            arrivals.append(began + (time_of(place) - time_of(position)) * factor)
        position = end
        began += step.duration_s
    return _requests(chosen, arrivals, max_tokens)


def gamma_requests(
    count: int, rate: float, cv: float, prompt_tokens: int, output_tokens: int, seed: int = 0
) -> list[SimRequest]:
    """Equal requests with gamma-distributed gaps; `cv` 1 is a Poisson process. The first one comes at 0."""
    generator = random.Random(f"arrivals {seed}")
    shape = 1 / cv**2
    gaps = (generator.gammavariate(shape, 1 / (shape * rate)) for _ in range(count - 1))
    return timed_requests(list(accumulate(gaps, initial=0.0)), prompt_tokens, output_tokens)


def timed_requests(arrivals_s: Sequence[float], prompt_tokens: int, output_tokens: int) -> list[SimRequest]:
    """Equal requests, nothing of them shared, at the given times."""
    return _requests([TraceRow(0, prompt_tokens, output_tokens)] * len(arrivals_s), arrivals_s, None)


def with_urgency(requests: Sequence[SimRequest], urgency: Urgency) -> list[SimRequest]:
    """The same requests of a client that is that urgent."""
    return [replace(request, urgency=urgency) for request in requests]


def merged(*streams: Sequence[SimRequest]) -> list[SimRequest]:
    """All of them, numbered anew in order of arrival."""
    together = sorted((request for stream in streams for request in stream), key=lambda request: request.arrival_s)
    return [replace(request, index=index) for index, request in enumerate(together)]


def _requests(rows: Sequence[TraceRow], arrivals_s: Sequence[float], max_tokens: int | None) -> list[SimRequest]:
    requests = []
    for index, (row, arrival) in enumerate(zip(rows, arrivals_s, strict=True)):
        asked = max(max_tokens or 0, row.output_length)
        requests.append(SimRequest(index, arrival, row.input_length, row.output_length, asked, row.hash_ids))
    return requests


def _spread(times_s: list[float], jitter_s: float, seed: int) -> list[float]:
    """Each time up to `jitter_s` later, in order again: requests of one tick come one after the other."""
    generator = random.Random(f"jitter {seed}")
    return sorted(time + generator.random() * jitter_s for time in times_s)


def _of_lap(row: TraceRow, lap: int) -> TraceRow:
    if not lap or not row.hash_ids:
        return row
    shifted = tuple(hash_id + lap * 10_000_019 for hash_id in row.hash_ids)  # more ids than a trace here has
    return TraceRow(row.timestamp, row.input_length, row.output_length, shifted)
