"""WaitingLine: the generations that wait, who goes next and where to, and who is refused and in which words. No I/O.

It puts admission (whose turn it is) and placement (where there is credit) together. A head that must wait holds up
those behind it, small and large, or it would never have its turn; but not on workers that could not serve it anyway,
however idle. Whoever is refused is still in line: the caller ends it, which takes it out.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from ..core.queueing import Waiting
from ..core.request import Urgency
from .admission import Admission, Place
from .generation import Generation, Unavailable
from .placement import Placement
from .router import Route


class Departure(NamedTuple):
    """Its turn has come. `num_missing`: prompt tokens that no cache had when it came."""

    generation: Generation
    route: Route
    num_missing: int


class Refusal(NamedTuple):
    """It is not served. `reason` is what is counted."""

    generation: Generation
    error: Unavailable
    reason: str


class WaitingLine:
    """Of one dispatcher, which also tells it what is in flight."""

    def __init__(self, admission: Admission, placement: Placement):
        self._admission = admission
        self._placement = placement
        self._waiting: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, generation: Generation) -> bool:
        return generation.key in self._waiting

    @property
    def num_batch(self) -> int:
        return self._admission.num_batch_queued

    def place(self, generation: Generation, now: float) -> Place | None:
        """None when it does not wait. While the queue has not moved enough to tell when its turn is: by what is known
        of the workers.
        """
        place = self._admission.place(generation.key, now)
        if place is None or place.start_s is not None:
            return place
        return Place(place.position, self._placement.start_s(place.position, now))

    # ---- in and out ------------------------------------------------------------------------------------------------

    def make_room(self, urgency: Urgency, now: float) -> Refusal | None:
        """For a newcomer: None when there is some, or who must go for it. Raises Unavailable when it cannot come."""
        if not self._admission.is_full(is_batch=urgency.is_batch):
            return None
        retry_after = self._admission.retry_after(now, is_batch=urgency.is_batch)
        text = f"all workers are busy and {len(self)} requests wait; try again in {retry_after} s"
        error = Unavailable(text, 429, retry_after)
        victim = self._admission.who_makes_way(urgency)
        if victim is None:
            raise error
        return Refusal(self._waiting[victim], error, "queue_full")

    def enter(self, generation: Generation, *, returning: bool = False) -> None:
        """`returning`: it was sent out before, and goes before all of its class."""
        self._waiting[generation.key] = generation
        self._admission.enqueue(generation.waiting(self._placement.num_missing(generation)), returning=returning)

    def leave(self, generation: Generation) -> None:
        """Nothing happens when it does not wait."""
        if self._waiting.pop(generation.key, None) is not None:
            self._admission.dequeue(generation.key)

    # ---- turns -----------------------------------------------------------------------------------------------------

    def next(self, now: float, in_flight: Iterable[Generation]) -> Departure | Refusal | None:
        """The head of the queue, if it can go somewhere now or never will; else the first one behind it that can go
        where none of those before it could ever be served; else None, and all wait.

        `in_flight`: what is on workers now, in the order it was sent.
        """
        entry = self._admission.head(now)
        if entry is None:
            return None
        generation = self._waiting[entry.request_id]
        route = self._placement.choose(generation, now)
        if route is not None:
            return self._turn_of(entry, route, now, in_flight)
        misfit = self._placement.misfit(generation)
        if misfit is not None:
            return Refusal(generation, misfit, "no_worker")
        return self._behind(entry, now, in_flight)

    def _behind(self, head: Waiting, now: float, in_flight: Iterable[Generation]) -> Departure | Refusal | None:
        """Workers too small for the head need not idle until it has its turn. They are no loss to it, and each one
        that is passed keeps all workers that it fits, so that nobody who waits is put off by who came later.
        """
        taken = self._placement.holders(self._waiting[head.request_id])
        if not self._placement.others(taken):
            return None
        for entry in self._admission.in_order(now):
            generation = self._waiting[entry.request_id]
            if entry.is_batch != head.is_batch:
                break
            holders = self._placement.holders(generation)
            if holders <= taken:
                continue
            route = self._placement.choose(generation, now, without=taken)
            if route is not None:
                return self._turn_of(entry, route, now, in_flight)
            taken |= holders
            if not self._placement.others(taken):
                break
        return None

    def _turn_of(
        self, entry: Waiting, route: Route, now: float, in_flight: Iterable[Generation]
    ) -> Departure | Refusal | None:
        """It can go there; None: better not yet."""
        generation = self._waiting[entry.request_id]
        if not entry.is_batch and route.wait_s is None and self._is_stuck(route, now, in_flight):
            return None
        if self._is_too_late(generation, route, now):
            return self._late(generation, now, route.wait_s or 0.0)
        return Departure(generation, route, entry.num_tokens)

    def _is_too_late(self, generation: Generation, route: Route, now: float) -> bool:
        """Would its first token miss the target for certain? One that was sent out before is not asked."""
        if generation.urgency.is_batch or generation.was_dispatched or route.wait_s is None or route.ttft_s is None:
            return False
        return self._admission.is_too_late(now - generation.queued_at, route.wait_s, route.ttft_s - route.wait_s)

    def _is_stuck(self, route: Route, now: float, in_flight: Iterable[Generation]) -> bool:
        """Where nothing can be predicted: has the prompt that was sent there first waited for too long?"""
        for generation in in_flight:
            attempt = generation.attempt
            if attempt is None or attempt.prompt_done or generation.urgency.is_batch:
                continue
            if attempt.route.computes_on == route.computes_on:
                return self._admission.is_stuck(now - generation.last_progress)
        return False

    # ---- early and late ends ----------------------------------------------------------------------------------------

    def overdue(self, now: float) -> list[Refusal]:
        """Who has waited for longer than allowed."""
        refusals = []
        for key, reason in self._admission.expired(now):
            generation = self._waiting[key]
            if reason == "deadline":
                refusals.append(self._late(generation, now))
                continue
            error = self._placement.refusal(generation, now)
            refusals.append(Refusal(generation, error, reason if error.status == 429 else "no_worker"))
        return refusals

    def hopeless(self, generation: Generation, now: float) -> Refusal | None:
        """A newcomer whose turn would come after its target."""
        return self._late(generation, now) if self._admission.is_hopeless(generation.key, now) else None

    def _late(self, generation: Generation, now: float, wait_s: float = 0.0) -> Refusal:
        retry_after = max(self._admission.retry_after(now), math.ceil(wait_s))
        text = self._admission.deadline_text(retry_after)
        return Refusal(generation, Unavailable(text, 429, retry_after), "deadline")
