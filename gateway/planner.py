"""Planner: how many workers compute prompts only, so that both targets are kept at the highest load. Pure.

For servers with both targets. Every LOOK_S the capacity (capacity.py) of the present division of the workers is set
beside those with up to _FAR prefill workers more or less, and with none: for prompts and answers like those of late,
where KEPT of the requests are to keep both targets, or nearly as many as can. A better one must be better where a few
less are asked for, too: some long prompts that one division just keeps and another just misses are no reason. Where one
is better by more than LEAST_GAIN and _ERRORS times what so few prompts can mislead by, and LOST_S of work are lost
without it in one run, one worker changes its role towards it: after some 5 s at a tenth. What lies between may be worse
than both, as long prompts wait for few prefill workers and for decodes too. It does not depend on how high the load is,
so the fleet is divided rightly before a rush comes, and waits cut short by refusals do not hide what is missing.

With few prompts nothing is concluded. Changes are CHANGE_INTERVAL_S apart, and one that goes against the last comes
REST_S after it at the earliest and for BACK_LOST_S; that, the gain and the time that a mix is averaged over
(measuring.py) keep roles from swinging. At least one worker decodes. None need prefill only: who decodes computes
prompts as well. Workers that were given both roles by hand count as such, and are left alone.
"""

import math
from collections.abc import Callable, Mapping

from ..core.messages import NodeRef, Role
from .capacity import KEPT, Outlook, capacity, idle_share
from .elastic import CHANGE_INTERVAL_S, REST_S, RoleChange

LOOK_S = 2.0
LEAST_GAIN = 0.05
LOST_S = 0.5
BACK_LOST_S = 2.5
_FAR = 2  # workers; a look takes some milliseconds for each division
_ERRORS = 1.5  # of the mix, that a gain must be beyond
_NEARLY = 0.97  # where prompts are so long that fewer than KEPT keep the targets even on an idle fleet
_MOST_GAIN = 1.0  # a division that can do nothing at present is not decided over by a single look
_STAYS = 0, 0.0, ""
_PREFILL_ONLY, _DECODE_ONLY = (Role.PREFILL,), (Role.DECODE,)


class Planner:
    """Give it the present roles often; it answers with a change now and then."""

    def __init__(self) -> None:
        self._look_at = -math.inf
        self._seen: tuple[Outlook | None, list[tuple[Role, ...]]] = None, []  # at the last look,
        self._found = _STAYS  # and what followed from it
        self._wanted = 0  # prefill workers more, or less
        self._lost_s = 0.0  # since it is wanted: gain, summed over the time
        self._last_change = 0  # of what kind it was,
        self._changed_at = -math.inf  # and when

    def update(
        self, now: float, masks: Mapping[NodeRef, tuple[Role, ...]], outlook: Callable[[float], Outlook | None]
    ) -> RoleChange | None:
        """`masks`: the roles of each worker, those that can best take more work first. `outlook` None: too little is
        known. The change is taken as made.
        """
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        seen = outlook(now), list(masks.values())
        if seen != self._seen:
            self._seen, self._found = seen, _STAYS if seen[0] is None else _better(masks, seen[0])
        wanted, gain, reason = self._found
        self._lost_s = self._lost_s + min(gain, _MOST_GAIN) * LOOK_S if wanted == self._wanted else 0.0
        self._wanted = wanted
        is_back = wanted == -self._last_change
        rest_s, enough_s = (REST_S, BACK_LOST_S) if is_back else (CHANGE_INTERVAL_S, LOST_S)
        if not wanted or self._lost_s < enough_s or now - self._changed_at < rest_s:
            return None
        self._last_change, self._changed_at = wanted, now
        old, new = (_DECODE_ONLY, _PREFILL_ONLY) if wanted > 0 else (_PREFILL_ONLY, _DECODE_ONLY)
        return RoleChange(next(ref for ref, mask in masks.items() if mask == old), new, reason)


def _better(masks: Mapping[NodeRef, tuple[Role, ...]], outlook: Outlook) -> tuple[int, float, str]:
    """Whether more (1) or fewer (-1) prefill workers are much better, by what share, and why; 0: neither."""
    num_prefill = sum(mask == _PREFILL_ONLY for mask in masks.values())
    num_decode = len(masks) - num_prefill
    if not num_decode:
        return _STAYS
    num_free = min(num_decode - 1, sum(mask == _DECODE_ONLY for mask in masks.values()))
    near = [more for more in range(-_FAR, _FAR + 1) if more and -num_prefill <= more <= num_free]
    changes = [0, *sorted({*near, -num_prefill} - {0}, key=abs)]
    possible = max(idle_share(num_prefill + more, num_decode - more, outlook) for more in changes)
    kept = min(KEPT, _NEARLY * possible)
    if kept == 0.0:
        return _STAYS
    present, *others = (capacity(num_prefill + more, num_decode - more, outlook, kept) for more in changes)
    best, wanted = max(zip(others, changes[1:], strict=True), default=(0.0, 0), key=lambda pair: pair[0])
    gain = _gain(best, present)
    if gain > LEAST_GAIN:
        pair = (capacity(num_prefill + more, num_decode - more, outlook, _NEARLY * kept) for more in (wanted, 0))
        gain = min(gain, _gain(*pair))
    if gain <= LEAST_GAIN + _ERRORS * outlook.mix.error:
        return _STAYS
    reason = (
        f"{_division(num_prefill + wanted, num_decode - wanted)} are predicted to keep both targets up to {best:.2f} "
        f"requests/s, {_division(num_prefill, num_decode)} up to {present:.2f}"
    )
    return (1 if wanted > 0 else -1), gain, reason


def _gain(better: float, present: float) -> float:
    return better / present - 1 if present else _MOST_GAIN * (better > 0.0)


def _division(num_prefill: int, num_decode: int) -> str:
    return f"{num_prefill} prefill + {num_decode} decode"
