"""Credits: which decode workers can take one more request. Pure.

A worker is given as many requests as it runs at a time (its cap may change), those more that will find a place within
AHEAD_S as things go, so that their prompts are computed meanwhile, and no more than its pool holds at the worst moment
that is to come (growth.py). At present there must also be a block for each of the others to go on with, or the worker
lets the newcomer wait. Who is sent too early waits there, where nothing is known of its deadline.

A request for several choices of one prompt holds its full blocks once, and of its own for each choice the last one and
what they grow by. It waits until there are places for all of them; alone it may have everything, and its choices then
take turns.

Interactive requests look at each other only: what batch requests hold makes way for them, by preemption. Batch
requests look at all, and leave 1/LEFT_FREE of places and blocks for whoever comes next.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ..core.errors import LocalProtocolError
from ..core.messages import NodeRef
from .growth import AnswerLengths, Peak

LEFT_FREE = 8  # batch requests leave 1/8
AHEAD_S = 0.25
_MOST_AHEAD = 4  # 1/4 of a cap
_RATE_WINDOW_S = 10.0
_REVIEW_TOKENS = 32  # of progress, after which an answer's length is predicted anew


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What a request needs: `num_tokens` of prompt and answer so far, of which `num_generated` are answer; at most
    `max_tokens` of answer in all. `num_choices` answers of that length, when none of them has begun."""

    num_tokens: int
    num_generated: int
    max_tokens: int
    is_batch: bool = False
    num_choices: int = 1


@dataclass(slots=True, eq=False)
class _Held:
    """One choice in flight. The tokens in blocks that it shares with its siblings are counted in one of them."""

    worker: NodeRef
    num_tokens: int
    num_generated: int
    max_tokens: int
    is_batch: bool
    length: int  # predicted, of the answer
    review_at: int  # tokens of answer
    num_shared: int  # of num_tokens
    siblings: "list[_Held]"  # all in flight of one request, itself too

    @property
    def needs(self) -> tuple[int, int]:
        """Tokens now and to come."""
        return self.num_tokens, self.length - self.num_generated


@dataclass
class _Credit:
    """One worker. Peaks stay true while all answers grow alike, so they are found anew only now and then."""

    block_size: int
    num_blocks: int
    max_running: int
    cap: int | None = None
    held: dict[str, _Held] = field(default_factory=dict)
    num_batch: int = 0
    releases: deque[float] = field(default_factory=deque)  # of the last seconds
    _num_new_tokens: int = 0
    _peaks: dict[bool, Peak] = field(default_factory=dict)  # with batch or without

    def released(self, now: float) -> None:
        self.releases.append(now)
        self._forget_old_releases(now)

    def covers(self, ask: Ask, remaining: int, now: float) -> bool:
        places, blocks, num_held = self._places(now), self.num_blocks, len(self.held)
        if not ask.is_batch:
            num_held -= self.num_batch
        elif num_held:  # one alone may have all
            places, blocks = (max(total - -(-total // LEFT_FREE), 1) for total in (places, blocks))
        num_choices = ask.num_choices if num_held else 1
        if num_held + min(num_choices, places) > places:
            return False
        peak = self._peak(ask.is_batch)
        if num_choices > 1:
            others = [(ask.num_tokens % self.block_size, remaining)] * (num_choices - 1)
            peak = Peak([*self._needs(ask.is_batch), *others], self.block_size)
        now_blocks = peak.blocks_now_with(ask.num_tokens) + num_held + num_choices - 1
        return max(peak.blocks_with(ask.num_tokens, remaining), now_blocks) <= blocks

    def _places(self, now: float) -> int:
        if self.cap is None:
            return self.max_running
        self._forget_old_releases(now)
        soon = int(len(self.releases) / _RATE_WINDOW_S * AHEAD_S)
        return min(self.cap + min(soon, self.cap // _MOST_AHEAD), self.max_running)

    def _forget_old_releases(self, now: float) -> None:
        while self.releases and now - self.releases[0] > _RATE_WINDOW_S:
            self.releases.popleft()

    def changed(self) -> None:
        self._num_new_tokens = 0
        self._peaks.clear()

    def grown(self, num_tokens: int) -> None:
        self._num_new_tokens += num_tokens
        if self._num_new_tokens > _REVIEW_TOKENS * len(self.held):
            self.changed()

    def _peak(self, with_batch: bool) -> Peak:
        if with_batch not in self._peaks:
            self._peaks[with_batch] = Peak(self._needs(with_batch), self.block_size)
        return self._peaks[with_batch]

    def _needs(self, with_batch: bool) -> list[tuple[int, int]]:
        return [held.needs for held in self.held.values() if with_batch or not held.is_batch]


class Credits:
    """Of all workers. Requests are named by their ids."""

    def __init__(self) -> None:
        self._lengths = AnswerLengths()
        self._credits: dict[NodeRef, _Credit] = {}
        self._held: dict[str, _Held] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._held)

    def add_worker(self, ref: NodeRef, *, block_size: int, num_blocks: int, max_running: int) -> None:
        """`max_running`: requests that it ever takes at a time."""
        self._credits[ref] = _Credit(block_size, num_blocks, max_running)

    def remove_worker(self, ref: NodeRef) -> None:
        """Its credit goes; the requests that held some must still be released."""
        self._credits.pop(ref, None)

    def set_cap(self, ref: NodeRef, cap: int | None) -> None:
        """How many requests the worker runs at a time now; None: it does not say."""
        if (credit := self._credits.get(ref)) is not None:
            credit.cap = cap

    def with_credit(self, ask: Ask, now: float) -> list[NodeRef]:
        """Workers that can take it now."""
        remaining = self._lengths.remaining(ask.num_generated, ask.max_tokens)
        return [ref for ref, credit in self._credits.items() if credit.covers(ask, remaining, now)]

    def take(self, request_id: str, ref: NodeRef, ask: Ask, now: float, others: Sequence[str] = ()) -> None:
        """For one choice, and for `others` of the same request; each is given back by itself.

        Raises LocalProtocolError when the request holds credit already or the worker has none for it.
        """
        credit = self._credits.get(ref)
        remaining = self._lengths.remaining(ask.num_generated, ask.max_tokens)
        if request_id in self._held or credit is None or not credit.covers(ask, remaining, now):
            raise LocalProtocolError(f"no credit for request {request_id} on {ref.node_id}")
        assert ask.num_choices == 1 + len(others)
        length = ask.num_generated + remaining
        review_at = min(ask.num_generated + _REVIEW_TOKENS, length)
        num_own = ask.num_tokens % credit.block_size
        siblings: list[_Held] = []
        for choice_id in (request_id, *others):
            num_shared = 0 if siblings else ask.num_tokens - num_own
            held = _Held(
                ref, num_shared + num_own, ask.num_generated, ask.max_tokens, ask.is_batch, length, review_at,
                num_shared, siblings,
            )  # fmt: skip
            siblings.append(held)
            self._held[choice_id] = credit.held[choice_id] = held
            credit.num_batch += ask.is_batch
        credit.changed()

    def generated(self, request_id: str, num_tokens: int) -> None:
        """So many tokens of the answer have come; nothing happens when the request holds no credit."""
        held = self._held.get(request_id)
        if held is None:
            return
        held.num_tokens += num_tokens
        held.num_generated += num_tokens
        if held.num_generated >= held.review_at:
            held.length = held.num_generated + self._lengths.remaining(held.num_generated, held.max_tokens)
            held.review_at = min(held.num_generated + _REVIEW_TOKENS, held.length)
        if (credit := self._credits.get(held.worker)) is not None:
            credit.grown(num_tokens)

    def ends_s(self, ref: NodeRef, step_s: float) -> list[float]:
        """Seconds until each request on the worker is predicted to end, where every step of it takes `step_s`."""
        credit = self._credits.get(ref)
        return [max(held.length - held.num_generated, 1) * step_s for held in credit.held.values()] if credit else []

    def release(self, request_id: str, now: float, *, was_served: bool = True) -> None:
        """Raises LocalProtocolError when the request holds no credit: it is given back exactly once.

        `was_served`: it has been answered, so that places become free at that rate.
        """
        held = self._held.pop(request_id, None)
        if held is None:
            raise LocalProtocolError(f"request {request_id} holds no credit to give back")
        held.siblings.remove(held)
        if held.siblings:
            held.siblings[0].num_tokens += held.num_shared
            held.siblings[0].num_shared += held.num_shared
        credit = self._credits.get(held.worker)
        if credit is not None and credit.held.pop(request_id, None) is not None:
            credit.num_batch -= held.is_batch
            if was_served:
                credit.released(now)
            credit.changed()

    def answered(self, num_tokens: int, *, was_cut: bool) -> None:
        """An answer has ended with so many tokens; `was_cut`: by its max_tokens."""
        self._lengths.learn(num_tokens, was_cut=was_cut)
