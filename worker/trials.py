"""Trials: which steps a worker measures before it joins, so that nobody has to guess what its steps cost. Pure.

A prompt's chunk, a batch of decodes, and now and then both in one step, again and again. Sizes and contexts come from
a sequence that fills the plane evenly wherever it is cut off (R2 by Roberts: multiples of 1/p and 1/p^2, p being the
plastic number), so a slow device tries as wide a range as a fast one, only fewer points of it. Sizes are spread by
their logarithm.

Each sequence of a step has blocks of its own, from the first scratch block on: what a sequence shares with another one
would lie in the device's caches. No step takes more than `SCRATCH_TOKENS` of the pool.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..core.step_cost import StepCost, StepShape, chunk_products

GOAL_S = 1.2  # trials take about so long, when that is enough for all to be known
MOST_S = 4.0  # and on a device that is too slow for that at most so long
SLOW_S = 2.0  # a device that needs so long for the three smallest is not measured
NUM_ROUNDS = 8  # of trials, on a device that is fast
SCRATCH_TOKENS = 2048
_LONGEST = 0.125  # of the goal, that one step may take
_LONGEST_OF_SLOW = 2.0  # times the base cost, where that is more
_LEAST_PROMPT = 16
_LEAST_CONTEXT = 16
_FIRST = 0.05  # where the sequence begins: with small steps, while nothing is known of the device
_STRIDES = (0.7548776662466927, 0.5698402909980532)
_ROUND = ("prompt", "decode", "mixed", "prompt", "decode")


@dataclass(frozen=True)
class Trial:
    """One step: prompt chunks as (tokens before it, tokens of it), and decodes by the tokens that each attends to."""

    prompts: tuple[tuple[int, int], ...] = ()
    decodes: tuple[int, ...] = ()

    @property
    def shape(self) -> StepShape:
        return StepShape(
            num_prompt_tokens=sum(n for _, n in self.prompts),
            prompt_products=sum(chunk_products(start, n) for start, n in self.prompts),
            num_decodes=len(self.decodes),
            decode_context=sum(self.decodes),
        )

    def num_blocks(self, block_size: int) -> int:
        lengths = (*self.decodes, *(start + n for start, n in self.prompts))
        return sum(-(-length // block_size) for length in lengths)


@dataclass(frozen=True)
class TrialLimits:
    """What a step of this worker may hold. `max_batch` 0: it is not made for decodes."""

    token_budget: int
    max_batch: int
    context_length: int
    num_blocks: int
    block_size: int

    @property
    def num_scratch_blocks(self) -> int:
        """That the trials may use together."""
        return min(self.num_blocks, max(SCRATCH_TOKENS // self.block_size, 1))

    @property
    def longest(self) -> int:
        """Tokens of one sequence."""
        return min(self.context_length, self.num_scratch_blocks * self.block_size)


def warmups(limits: TrialLimits) -> list[Trial]:
    """The smallest trials, one of each kind. The first steps of a process take longer than any later one: run these
    twice, and learn from the second time.
    """
    found = [_prompt(limits, 0.0, 0.0), _decode(limits, 0.0, 0.0), _mixed(limits, 0.0, 0.0)]
    return [trial for trial in found if trial is not None]


def trials(limits: TrialLimits) -> Iterator[Trial]:
    """All there are, the most telling ones first; none that does not fit."""
    make = {"prompt": _prompt, "decode": _decode, "mixed": _mixed}
    for number in range(NUM_ROUNDS * len(_ROUND)):
        u, v = ((_FIRST + number * stride) % 1.0 for stride in _STRIDES)
        trial = make[_ROUND[number % len(_ROUND)]](limits, u, v)
        if trial is not None:
            yield trial


def is_worth_its_time(trial: Trial, cost: StepCost) -> bool:
    """Not when it is predicted to take much of the time that there is for all of them."""
    return cost.seconds(trial.shape) <= max(_LONGEST * GOAL_S, _LONGEST_OF_SLOW * cost.base_s)


def is_over(elapsed_s: float, cost: StepCost, limits: TrialLimits) -> bool:
    """Is enough known, or no time left?"""
    is_known = cost.knows_prompts and (cost.knows_decodes or not limits.max_batch)
    return elapsed_s > (GOAL_S if is_known else MOST_S)


def _prompt(limits: TrialLimits, size: float, context: float) -> Trial:
    """One chunk, mostly with little in front of it: so are prompts."""
    num_tokens = _between(_LEAST_PROMPT, min(limits.token_budget, limits.longest), size)
    start = int(context**2 * (limits.longest - num_tokens))
    return Trial(prompts=((start, num_tokens),))


def _decode(limits: TrialLimits, size: float, context: float) -> Trial | None:
    if not limits.max_batch:
        return None
    batch = _between(1, min(limits.max_batch, limits.token_budget, limits.num_scratch_blocks), size)
    room = limits.num_scratch_blocks // batch * limits.block_size
    return Trial(decodes=(_between(_LEAST_CONTEXT, min(room, limits.longest), context),) * batch)


def _mixed(limits: TrialLimits, size: float, context: float) -> Trial | None:
    """Decodes, and a chunk whose size has nothing to do with theirs."""
    decode = _decode(limits, size, 1.0 - context)
    if decode is None:
        return None
    taken = decode.num_blocks(limits.block_size)
    room = (limits.num_scratch_blocks - taken) * limits.block_size
    most = min(limits.token_budget - len(decode.decodes), room, limits.longest)
    if most < 1:
        return None
    return Trial(prompts=((0, _between(_LEAST_PROMPT, most, context)),), decodes=decode.decodes)


def _between(low: int, high: int, share: float) -> int:
    """From `low` (or `high`, if that is less) to `high`, evenly by the logarithm."""
    low = min(low, high)
    return min(max(round(low * math.pow(high / low, share)), low), high)
