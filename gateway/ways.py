"""The ways a prompt can go, and the cheapest of them: by predicted time, or by tokens. Pure; the rules: router.py."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ..core.messages import NodeRef
from .forecast import Pace, Speed, Work, rest_of_prompt
from .loads import SEQUENCE_WEIGHT, Load, Loads

LOCAL_TOKENS = 256  # about one chunk: what a decode worker computes within one step
_AT_ONCE = 2  # prompts that share a step, as a chunk is half of it
HARM = 0.25  # of the time that others lose, where nobody said what they can spare: most have some


class Candidate(msgspec.Struct, frozen=True):
    """A worker that can take the request, how many tokens of the prompt it has cached, and how fast it is if known."""

    ref: NodeRef
    cached_tokens: int
    speed: Speed | None = None


class Asked(NamedTuple):
    """What is to be routed, and when."""

    num_tokens: int
    is_batch: bool
    now: float
    may_be_local: bool = True  # False: where there is another way, it is taken

    def missing(self, cached_tokens: int) -> int:
        """At least one token is computed, for there must be one to sample from."""
        return max(self.num_tokens - cached_tokens, 1)


class Measured(NamedTuple):
    """What was seen of late, or said by the operator.

    `transfer_s`: of handing over one token. `answer_tokens`: mean length of answers; 0: none has ended.
    `overhead_s`: by which first tokens come later than steps explain (messages, hosts), the same on all ways.
    """

    transfer_s: float = 0.0
    answer_tokens: float = 0.0
    tpot_target_s: float | None = None
    overhead_s: float = 0.0

    def weight(self, lost_s: float, step_s: float) -> float:
        """Of time that sequences lose, `lost_s` in all, while their steps take `step_s`.

        A sequence can spare what its steps leave of the target over its whole answer; losing all that counts in full.
        """
        if self.tpot_target_s is None or not self.answer_tokens:
            return HARM
        spare_s = (self.tpot_target_s - step_s) * self.answer_tokens
        return min(lost_s / spare_s, 1.0) if spare_s > 0.0 else 1.0


class Way(NamedTuple):
    """`prefill` None: local. `num_returned_tokens` more than 0: returned. The missing ones are to be computed or sent.

    Seconds, None while costs are unknown: `wait_s` until computing begins, `ttft_s` until the first token, of which
    `lag_s` lies behind computing.
    """

    decode: NodeRef
    prefill: NodeRef | None
    decode_missing: int
    prefill_missing: int = 0
    num_returned_tokens: int = 0
    wait_s: float | None = None
    ttft_s: float | None = None
    lag_s: float = 0.0


# ---- by tokens -------------------------------------------------------------------------------------------------------


def cheapest_by_tokens(asked: Asked, loads: Loads, decode: list[Candidate], prefill: list[Candidate]) -> Way:
    """Of equals the first is taken."""

    def cost(candidate: Candidate) -> int:
        return asked.missing(candidate.cached_tokens) + loads[candidate.ref].tokens

    d = min(decode, key=cost)
    missing = asked.missing(d.cached_tokens)
    prefill = [candidate for candidate in prefill if candidate.ref != d.ref]
    if not prefill:
        return Way(d.ref, None, missing)
    if missing < min(asked.missing(candidate.cached_tokens) for candidate in prefill):
        if asked.may_be_local and missing <= LOCAL_TOKENS:
            return Way(d.ref, None, missing)
        p = min(prefill, key=lambda candidate: loads[candidate.ref].tokens)  # with what D returns, all lack the same
        return Way(d.ref, p.ref, missing, missing, d.cached_tokens)
    p = min(prefill, key=cost)
    return Way(d.ref, p.ref, missing, asked.missing(p.cached_tokens))


# ---- by predicted time -----------------------------------------------------------------------------------------------


def pace_of(load: Load, speed: Speed, *, as_prefill: bool) -> Pace:
    """How fast a worker with that load computes prompts."""
    return (speed.as_prefill if as_prefill else speed.as_decode)(load.decoding, load.context)


def wait_s(load: Load, pace: Pace, now: float, *, is_batch: bool) -> float:
    """Seconds until a prompt that is sent there now is begun."""
    # However long ago its last prompt was done: it has been at one or two, or it hangs and the others are not begun.
    done_s = min(load.elapsed_s(now), _AT_ONCE * pace.seconds(load.longest))
    return max(pace.seconds(load.backlog(is_batch=is_batch)) - done_s, 0.0) + pace.join_s


def cheapest_by_time(
    asked: Asked, loads: Loads, decode: list[Candidate], prefill: list[Candidate], measured: Measured
) -> Way | None:
    """Of equals the first is taken. None: some worker's speed is not known."""
    decoders = {candidate.ref for candidate in decode}
    all_here = (_place(c, loads[c.ref], asked, measured, as_prefill=False, decodes=True) for c in decode)
    all_there = (_place(c, loads[c.ref], asked, measured, as_prefill=True, decodes=c.ref in decoders) for c in prefill)
    here = [place for place in all_here if place is not None]
    there = [place for place in all_there if place is not None]
    if len(here) < len(decode) or len(there) < len(prefill):
        return None
    soonest = sorted(there, key=_Place.own_cost_s)
    cheapest, cheapest_s = None, math.inf
    for d in here:
        # Its tokens will come the slower, the more sequences there are.
        standing_s = SEQUENCE_WEIGHT * d.pace.per_prompt_token_s * loads[d.ref].sequences
        ways = _ways(d, soonest, measured.transfer_s, may_be_local=asked.may_be_local)
        for cost_s, way in ways:
            if cost_s + standing_s < cheapest_s:
                cheapest, cheapest_s = way, cost_s + standing_s
    return cheapest


class _Place(NamedTuple):
    """A worker as one that computes prompts, beside what it has to do already."""

    ref: NodeRef
    cached_tokens: int
    work: Work  # what it lacks
    pace: Pace
    backlog: Work
    wait_s: float
    num_harmed: int  # sequences that come later by what is computed here: those it has, and one that will come
    measured: Measured

    def compute_s(self, work: Work) -> float:
        return self.pace.compute_s(self.backlog, work)

    def harm_s(self, work: Work) -> float:
        if not self.num_harmed:
            return 0.0
        lost_s = self.pace.tokens_s(work)
        weight = self.measured.weight(self.pace.tokens_s(self.backlog) + lost_s, self.pace.step_s)
        return weight * lost_s * self.num_harmed

    def own_cost_s(self) -> float:
        return self.wait_s + self.compute_s(self.work) + self.harm_s(self.work)


def _place(
    candidate: Candidate, load: Load, asked: Asked, measured: Measured, *, as_prefill: bool, decodes: bool
) -> _Place | None:
    """None: its speed is not known."""
    if candidate.speed is None:
        return None
    pace = pace_of(load, candidate.speed, as_prefill=as_prefill)
    return _Place(
        candidate.ref,
        candidate.cached_tokens,
        rest_of_prompt(asked.num_tokens, asked.missing(candidate.cached_tokens)),
        pace,
        load.backlog(is_batch=asked.is_batch),
        wait_s(load, pace, asked.now, is_batch=asked.is_batch),
        load.sequences + decodes,
        measured,
    )


def _ways(d: _Place, soonest: list[_Place], transfer_s: float, *, may_be_local: bool) -> Iterator[tuple[float, Way]]:
    """(cost in seconds, way) of what can be done with decode worker `d`. Prefill workers by what they cost without it.

    Only a prefix that few decode workers hold is returned, so pairs are tried for few of them.
    """
    others = [place for place in soonest if place.ref != d.ref]
    if may_be_local or not others:
        ttft_s = d.wait_s + d.compute_s(d.work)
        yield ttft_s + d.harm_s(d.work), Way(d.ref, None, d.work.num_tokens, wait_s=d.wait_s, ttft_s=ttft_s)
    for p in others[:1]:
        yield _remote(d, p, p.work, 0, transfer_s)
    for p in others:
        if p.cached_tokens < d.cached_tokens:
            yield _remote(d, p, d.work, d.cached_tokens, transfer_s)


def _remote(d: _Place, p: _Place, work: Work, num_returned: int, transfer_s: float) -> tuple[float, Way]:
    """P computes `work`. What D returns travels while the prompt waits, what D lacks while it is computed; the last
    chunk only then. D samples the first token between two of its steps.
    """
    missing = d.work.num_tokens
    begin_s = p.wait_s
    if num_returned:
        begin_s = max(begin_s, (num_returned - p.cached_tokens) * transfer_s)
    compute_s = p.compute_s(work)
    last_s = min(missing, p.pace.chunk_size) * transfer_s
    lag_s = max(missing * transfer_s - compute_s, last_s) + d.pace.join_s
    ttft_s = begin_s + compute_s + lag_s
    way = Way(d.ref, p.ref, missing, work.num_tokens, num_returned, begin_s, ttft_s, lag_s)
    return ttft_s + p.harm_s(work), way
