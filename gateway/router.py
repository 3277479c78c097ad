"""Which decode worker generates, and whether and where a prefill worker computes the prompt. Pure.

The second turn of a chat finds the first prompt and the answer on a decode worker D, and at most the prompt on a
prefill worker P. So there are three ways for a prompt of which D lacks `missing(D)` tokens and P lacks `missing(P)`:

    local      D computes what it lacks, in steps that carry its decodes too
    remote     P computes what it lacks and hands over what D lacks
    returned   D first returns to P the KV that only D has; P then computes what both lack

*By predicted time*, once the workers have learned what their steps cost (forecast.py). The way and the workers are
those of least cost, in seconds:

    cost = TTFT of this request                                     wait, compute, transfer, half a step of D
         + weight * compute of its tokens * sequences beside it     who decodes where they are computed, and who comes
         + SEQUENCE_WEIGHT * per_prompt_token * sequences of D      its tokens will come the slower, the more there are

    weight   = what they lose by it and by those before it, of what they can spare: (TPOT target - step) * answer;
               HARM while that is not known
    transfer = tokens * seconds per token, as measured; what overlaps with computing is left out, the last chunk is not

*By tokens* while that is unknown, of one worker at least:

    load(w)    = prompt tokens sent to w and still missing there + SEQUENCE_WEIGHT for each sequence of w
    cost(w)    = missing(w) + load(w)

D and P are those of least cost. When D lacks less than every P, the rest is computed on D itself if it is short
(LOCAL_TOKENS), else it is returned; a prompt that is as cold on D as on P is remote.

Without a P other than D all is local; with one, nothing is where the operator wants that (`--local-prefill never`).

Either way a match is worth exactly what it saves, load counts from the moment of dispatch, and among equals the turn
goes round. A worker may have both roles; it never hands over to itself: that is local.
"""

import msgspec

from ..core.messages import NodeRef
from .forecast import Speed, Work, rest_of_prompt
from .loads import Loads
from .ways import Asked, Candidate, Measured, cheapest_by_time, cheapest_by_tokens, pace_of, wait_s


class Route(msgspec.Struct, frozen=True):
    """`prefill` None: the decode worker computes the prompt. The missing tokens are those the load was raised by.

    `num_returned_tokens`: the decode worker first returns the KV of that many tokens to the prefill worker.
    `wait_s` is the predicted time until this prompt's own computing begins, `ttft_s` until its first token; both count
    from `chosen_at` and are None while costs are unknown. `lag_s` of it lies behind the computing.
    """

    decode: NodeRef
    prefill: NodeRef | None
    decode_missing: int
    prefill_missing: int
    num_returned_tokens: int = 0
    num_tokens: int = 0
    is_batch: bool = False
    chosen_at: float = 0.0
    wait_s: float | None = None
    ttft_s: float | None = None
    lag_s: float = 0.0
    num_choices: int = 1  # sequences that the decode worker will run

    @property
    def is_local(self) -> bool:
        return self.prefill is None

    @property
    def way(self) -> str:
        """For people and metrics."""
        if self.is_local:
            return "local"
        return "returned" if self.num_returned_tokens else "remote"

    @property
    def computes_on(self) -> NodeRef:
        return self.decode if self.prefill is None else self.prefill

    @property
    def work(self) -> Work:
        """Of the worker that computes the prompt."""
        num_missing = self.decode_missing if self.prefill is None else self.prefill_missing
        return rest_of_prompt(max(self.num_tokens, num_missing), num_missing)

    def without_prefill(self) -> "Route":
        """The decode worker computes the prompt after all. Nothing is predicted of it."""
        return Route(
            self.decode,
            None,
            self.decode_missing,
            0,
            num_tokens=self.num_tokens,
            is_batch=self.is_batch,
            chosen_at=self.chosen_at,
            num_choices=self.num_choices,
        )


class Router:
    """Chooses routes and counts the load that its choices put on the workers.

    `measured` is to be set from what was. `may_be_local` False: no prompt is local while
    another worker than its decode worker has the prefill role.
    """

    def __init__(self, *, may_be_local: bool = True) -> None:
        self._may_be_local = may_be_local
        self._loads = Loads()
        self._turn = 0
        self.measured = Measured()

    def load(self, ref: NodeRef) -> int:
        """In tokens, see above."""
        return self._loads[ref].tokens

    def backlog_s(self, ref: NodeRef, speed: Speed, now: float, *, as_prefill: bool) -> float:
        """Seconds until a prompt that is sent there now would be begun."""
        load = self._loads[ref]
        return wait_s(load, pace_of(load, speed, as_prefill=as_prefill), now, is_batch=False)

    def step_s(self, ref: NodeRef, speed: Speed) -> float:
        """Seconds of a step there that decodes all that was sent there."""
        load = self._loads[ref]
        return speed.cost.base_s + speed.decodes_s(load.sequences, load.context)

    @property
    def num_prompting(self) -> int:
        """Sequences that hold a place on a decode worker and have no first token yet."""
        return sum(load.prompting for load in self._loads)

    @property
    def num_decoding(self) -> int:
        return sum(load.decoding for load in self._loads)

    def choose(
        self,
        num_tokens: int,
        decode: list[Candidate],
        prefill: list[Candidate],
        now: float,
        *,
        is_batch: bool = False,
        num_choices: int = 1,
    ) -> Route:
        """The route for a prompt of `num_tokens`. `decode` must not be empty. Counts nothing yet."""
        self._turn += 1
        asked = Asked(num_tokens, is_batch, now, self._may_be_local)
        decode, prefill = self._in_turn(decode), self._in_turn(prefill)
        way = cheapest_by_time(asked, self._loads, decode, prefill, self.measured)
        if way is None:
            way = cheapest_by_tokens(asked, self._loads, decode, prefill)
        return Route(
            decode=way.decode,
            prefill=way.prefill,
            decode_missing=way.decode_missing,
            prefill_missing=way.prefill_missing,
            num_returned_tokens=way.num_returned_tokens,
            num_tokens=num_tokens,
            is_batch=is_batch,
            chosen_at=now,
            wait_s=way.wait_s,
            ttft_s=None if way.ttft_s is None else way.ttft_s + self.measured.overhead_s,
            lag_s=way.lag_s,
            num_choices=num_choices,
        )

    # ---- books ---------------------------------------------------------------------------------------------------

    def dispatched(self, route: Route, now: float) -> None:
        """The request is on its way."""
        decode = self._loads.of(route.decode)
        decode.missing_tokens += route.decode_missing
        decode.sequences += route.num_choices
        decode.prompting += route.num_choices
        decode.context += route.num_tokens
        self._loads.of(route.computes_on).add(route.work, now, is_batch=route.is_batch)
        if route.prefill is not None:
            self._loads.of(route.prefill).missing_tokens += route.prefill_missing

    def rerouted(self, old: Route, new: Route, now: float) -> None:
        """The prefill worker of `old` is gone before the prompt was done; its decode worker computes it, by `new`."""
        self._computed(old, now)
        self._loads.of(new.decode).add(new.work, now, is_batch=new.is_batch)

    def prompt_done(self, route: Route, now: float) -> None:
        """The prompt is computed (its first token came, or the request ended before)."""
        self._computed(route, now - route.lag_s)
        if (decode := self._loads.known(route.decode)) is not None:
            decode.missing_tokens -= route.decode_missing
            decode.prompting -= route.num_choices
            self._loads.tidy(route.decode)

    def ended(self, route: Route) -> None:
        """The request has left the decode worker; `prompt_done` came before."""
        if (decode := self._loads.known(route.decode)) is not None:
            decode.sequences -= route.num_choices
            decode.context -= route.num_tokens
            self._loads.tidy(route.decode)

    def forget(self, ref: NodeRef) -> None:
        """The worker is gone, and its load with it."""
        self._loads.forget(ref)

    def _computed(self, route: Route, at: float) -> None:
        if (load := self._loads.known(route.computes_on)) is not None:
            load.remove(route.work, at, is_batch=route.is_batch)
            if route.prefill is not None:
                load.missing_tokens -= route.prefill_missing
            self._loads.tidy(route.computes_on)

    def _in_turn(self, candidates: list[Candidate]) -> list[Candidate]:
        """Beginning with another one each time: the first of equals is taken."""
        start = self._turn % len(candidates) if candidates else 0
        return candidates[start:] + candidates[:start]
