"""Which decode worker generates, and whether and where a prefill worker computes the prompt. Pure.

All costs are in tokens. For a prompt of n tokens, with `m(w)` of them cached on worker w (by whole blocks):

    missing(w) = n - m(w)                            what w would have to compute or receive
    load(w)    = prompt tokens sent to w and still missing there
                 + SEQUENCE_WEIGHT for each sequence that w is generating for
    cost(w)    = missing(w) + load(w)

The decode worker D and the prefill worker P are those of least cost; among equals the turn goes round. So a match
is worth exactly the tokens it saves: a long match on a busy worker loses against an idle one without it, where a plain
longest-match would send everything to one worker. Load counts from the moment of dispatch.

The second turn of a chat finds the first prompt and the answer on D, and at most the prompt on P. When D lacks less
than every P, the rest is computed

    on D itself, when it is short:  missing(D) <= LOCAL_TOKENS
    on P, after D has returned to P the KV that only D has (`num_returned_tokens`), when it is long

so a long new message neither stops what D is generating nor makes P compute the old answer again. A prompt that is as
cold on D as on P goes through P always. Without a P, D computes everything.
"""

from dataclasses import dataclass, field

import msgspec

from ..core.messages import NodeRef

SEQUENCE_WEIGHT = 64  # tokens of prompt whose computing slows a worker about as much as one running sequence
LOCAL_TOKENS = 256  # about one chunk: what a decode worker computes within one step


class Candidate(msgspec.Struct, frozen=True):
    """A worker that can take the request, and how many tokens of the prompt it has cached."""

    ref: NodeRef
    cached_tokens: int


class Route(msgspec.Struct, frozen=True):
    """`prefill` None: the decode worker computes the prompt. The missing tokens are those the load was raised by.

    `num_returned_tokens`: the decode worker first returns the KV of that many tokens to the prefill worker.
    """

    decode: NodeRef
    prefill: NodeRef | None
    decode_missing: int
    prefill_missing: int
    num_returned_tokens: int = 0


@dataclass
class _Load:
    missing_tokens: int = 0
    sequences: int = 0

    @property
    def tokens(self) -> int:
        return self.missing_tokens + SEQUENCE_WEIGHT * self.sequences


@dataclass
class Router:
    """Chooses routes and counts the load that its choices put on the workers."""

    _loads: dict[NodeRef, _Load] = field(default_factory=dict)
    _turn: int = 0

    def load(self, ref: NodeRef) -> int:
        """In tokens, see above."""
        return self._loads[ref].tokens if ref in self._loads else 0

    def choose(self, num_tokens: int, decode: list[Candidate], prefill: list[Candidate]) -> Route:
        """The route for a prompt of `num_tokens`. `decode` must not be empty. Counts nothing yet."""
        self._turn += 1
        d = self._cheapest(num_tokens, decode)
        decode_missing = _missing(num_tokens, d)
        if not prefill:
            return Route(d.ref, None, decode_missing, 0)
        if decode_missing < min(_missing(num_tokens, c) for c in prefill):
            if decode_missing <= LOCAL_TOKENS:
                return Route(d.ref, None, decode_missing, 0)
            # With what D returns, every P lacks the same.
            p = self._cheapest(num_tokens, [Candidate(c.ref, d.cached_tokens) for c in prefill])
            return Route(d.ref, p.ref, decode_missing, decode_missing, d.cached_tokens)
        p = self._cheapest(num_tokens, prefill)
        return Route(d.ref, p.ref, decode_missing, _missing(num_tokens, p))

    def dispatched(self, route: Route) -> None:
        """The request is on its way."""
        decode = self._loads.setdefault(route.decode, _Load())
        decode.missing_tokens += route.decode_missing
        decode.sequences += 1
        if route.prefill is not None:
            self._loads.setdefault(route.prefill, _Load()).missing_tokens += route.prefill_missing

    def prompt_done(self, route: Route) -> None:
        """The prompt is computed (its first token came, or the request ended before)."""
        self._lower(route.decode, route.decode_missing, 0)
        if route.prefill is not None:
            self._lower(route.prefill, route.prefill_missing, 0)

    def ended(self, route: Route) -> None:
        """The request has left the decode worker; `prompt_done` came before."""
        self._lower(route.decode, 0, 1)

    def forget(self, ref: NodeRef) -> None:
        """The worker is gone, and its load with it."""
        self._loads.pop(ref, None)

    def _lower(self, ref: NodeRef, missing_tokens: int, sequences: int) -> None:
        load = self._loads.get(ref)
        if load is None:  # gone in the meantime
            return
        load.missing_tokens -= missing_tokens
        load.sequences -= sequences
        if load == _Load():
            del self._loads[ref]

    def _cheapest(self, num_tokens: int, candidates: list[Candidate]) -> Candidate:
        lowest = min(self._cost(num_tokens, candidate) for candidate in candidates)
        best = [c for c in candidates if self._cost(num_tokens, c) == lowest]
        return best[self._turn % len(best)]

    def _cost(self, num_tokens: int, candidate: Candidate) -> int:
        return _missing(num_tokens, candidate) + self.load(candidate.ref)


def _missing(num_tokens: int, candidate: Candidate) -> int:
    """At least one token is computed, for there must be one to sample from."""
    return max(num_tokens - candidate.cached_tokens, 1)
