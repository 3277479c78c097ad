"""Capacity: how many requests per second a fleet can take with both targets kept, by how its workers are divided. Pure.

k workers compute prompts only; the m others decode, and compute the share x of the prompts themselves. With
    p    seconds that a prompt's tokens take       d   seconds that one sequence adds to a decode step
    L    tokens of an answer                       r   requests per second
a worker that decodes has r/m * (x*p + L*d) of its time taken by what grows with the load, and the rest is left for the
fixed cost of its steps, so that (with Little's law for how many run at once)

    step = base / (1 - r/m * (x*p + L*d))          running = r/m * L * step

TPOT    the step, and late by the prompts that come during an answer: a Poisson number, mean r/m * x * L * step
        of them, each p long; their sum is taken as normal
TTFT    half a step (what runs is finished first), the wait, the prompt's own step, and on the k workers the hand-over.
        The wait is that of k (or m) servers at one queue, Poisson arrivals, services of the mean and mean square that
        p + the rest of the step has: P(wait > t) = busy * exp(-t / mean wait of those who wait),
        busy = load ** (sqrt(2 (n + 1)) - 1) (Sakasegawa, 1977).

A rate is kept when KEPT of the requests keep each target at the best x; of those requests, that is, whose prompts are
not too long for the target on an idle fleet. The model is rough: workers are alike, a prompt
is one step, and nobody is sent where it will be first. It is used to compare divisions, not to refuse anybody.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

from ..core.step_cost import StepCost
from .forecast import Speed, Work

KEPT = 0.9  # of the requests keep each target
_POOL_SHARE = 0.95  # of a pool is filled by plan
_LOCAL_SHARES = tuple(i / 8 for i in range(9))
_HALVINGS = 10


class PromptClass(NamedTuple):
    """Prompts of about one size: their share of all, what is computed of one, and its length."""

    share: float
    work: Work
    num_tokens: float


class Mix(NamedTuple):
    """What requests are like of late."""

    prompts: tuple[PromptClass, ...]
    answer_tokens: float


class Targets(NamedTuple):
    """In seconds."""

    ttft_s: float
    tpot_s: float


class Machine(NamedTuple):
    """What one worker is like, on average. `join_steps`: of decode, that a newcomer waits for."""

    cost: StepCost
    join_steps: float
    chunk_size: int
    pool_tokens: int


class Outlook(NamedTuple):
    """What capacities follow from. `transfer_s`: per token; `overhead_s`: of first tokens, beside what steps take."""

    mix: Mix
    machine: Machine
    targets: Targets
    transfer_s: float = 0.0
    overhead_s: float = 0.0


class _Line(NamedTuple):
    """`num_servers` at one queue, whose services have these moments."""

    num_servers: int
    rate: float
    mean_s: float
    mean_square: float

    def in_time(self, patience_s: float) -> float:
        """The share that waits no longer than that."""
        load = self.rate * self.mean_s / self.num_servers
        if load >= 1.0 or patience_s < 0.0:
            return 0.0
        if load == 0.0:
            return 1.0
        busy = math.pow(load, math.sqrt(2 * (self.num_servers + 1)) - 1)
        waiting_s = self.mean_square / (2 * self.mean_s * self.num_servers * (1 - load))
        return 1.0 - busy * math.exp(-patience_s / waiting_s)


def mean_machine(speeds: Collection[Speed], pool_tokens: int) -> Machine:
    """The mean of what is known of several; there must be one."""
    count, costs = len(speeds), [speed.cost for speed in speeds]
    cost = StepCost(
        base_s=sum(cost.base_s for cost in costs) / count,
        per_prompt_token_s=sum(cost.per_prompt_token_s for cost in costs) / count,
        per_product_s=sum(cost.per_product_s for cost in costs) / count,
        per_decode_s=sum(cost.per_decode_s for cost in costs) / count,
        per_context_s=sum(cost.per_context_s for cost in costs) / count,
    )
    join_steps = sum(speed.join_steps for speed in speeds) / count
    return Machine(cost, join_steps, max(speed.chunk_size for speed in speeds), pool_tokens)


def idle_share(num_prefill: int, num_decode: int, outlook: Outlook) -> float:
    """Of the requests, that keep each target where no other is there: prompts may be too long for it."""
    return _Division(num_prefill, num_decode, outlook).share_kept(0.0)


def capacity(num_prefill: int, num_decode: int, outlook: Outlook, kept_share: float = KEPT) -> float:
    """Requests per second of which `kept_share` keep each target, 0.0 if not even of few. `num_decode`: 1 at least."""
    division = _Division(num_prefill, num_decode, outlook)
    kept, lost = 0.0, division.greatest_rate
    for _ in range(_HALVINGS):
        middle = (kept + lost) / 2
        if division.share_kept(middle) >= kept_share:
            kept = middle
        else:
            lost = middle
    return kept


class _Division:
    """One way to divide the workers, under one outlook."""

    def __init__(self, num_prefill: int, num_decode: int, outlook: Outlook):
        self._num_prefill, self._num_decode, self._outlook = num_prefill, num_decode, outlook
        cost = outlook.machine.cost
        self._base_s = cost.base_s
        # (share, seconds of its tokens, seconds of its hand-over)
        self._prompts = [self._seconds_of(prompt) for prompt in outlook.mix.prompts]
        self._mean_s = sum(share * seconds for share, seconds, _ in self._prompts)
        self._mean_square = sum(share * seconds**2 for share, seconds, _ in self._prompts)
        prompt_tokens = sum(prompt.share * prompt.num_tokens for prompt in outlook.mix.prompts)
        self._context = prompt_tokens + outlook.mix.answer_tokens / 2
        self._decode_s = cost.per_decode_s + cost.per_context_s * self._context

    def _seconds_of(self, prompt: PromptClass) -> tuple[float, float, float]:
        cost, work = self._outlook.machine.cost, prompt.work
        seconds = cost.per_prompt_token_s * work.num_tokens + cost.per_product_s * work.products
        last_chunk = min(work.num_tokens, self._outlook.machine.chunk_size)
        transfer_s = self._outlook.transfer_s
        return prompt.share, seconds, max(work.num_tokens * transfer_s - seconds, last_chunk * transfer_s)

    @property
    def greatest_rate(self) -> float:
        """No more can be computed, whatever the targets."""
        seconds = self._mean_s + self._outlook.mix.answer_tokens * self._decode_s
        return (self._num_prefill + self._num_decode) / max(seconds, 1e-9)

    def share_kept(self, rate: float) -> float:
        """Of the requests, at the best share of prompts that are computed where they are decoded."""
        local = _LOCAL_SHARES if self._num_prefill else (1.0,)
        return max(self._share_kept(rate, share) for share in local)

    def _share_kept(self, rate: float, local: float) -> float:
        answer, per_worker = self._outlook.mix.answer_tokens, rate / self._num_decode
        taken = per_worker * (local * self._mean_s + answer * self._decode_s)
        if taken >= 1.0:
            return 0.0
        step_s = self._base_s / (1 - taken)
        running = per_worker * answer * step_s
        if running * self._context > _POOL_SHARE * self._outlook.machine.pool_tokens:
            return 0.0
        spread_s = math.sqrt(per_worker * local * answer * step_s * self._mean_square) / max(answer, 1.0)
        in_tpot = _normal(self._outlook.targets.tpot_s - step_s, spread_s)
        return min(in_tpot, self._in_ttft(rate, local, step_s, running * self._decode_s))

    def _in_ttft(self, rate: float, local: float, step_s: float, decodes_s: float) -> float:
        """`decodes_s`: what is decoded in a step, on average."""
        left_s = self._outlook.targets.ttft_s - self._outlook.overhead_s
        left_s -= self._outlook.machine.join_steps * step_s
        mixed_s = self._base_s + decodes_s
        here = self._line(self._num_decode, local * rate, mixed_s)
        there = self._line(self._num_prefill, (1 - local) * rate, self._base_s)
        share_in_time = 0.0
        for share, seconds, lag_s in self._prompts:
            if local > 0.0:
                share_in_time += share * local * here.in_time(left_s - seconds - mixed_s)
            if local < 1.0:
                share_in_time += share * (1 - local) * there.in_time(left_s - seconds - self._base_s - lag_s)
        return share_in_time

    def _line(self, num_servers: int, rate: float, fixed_s: float) -> _Line:
        mean_square = self._mean_square + 2 * self._mean_s * fixed_s + fixed_s**2
        return _Line(num_servers, rate, self._mean_s + fixed_s, mean_square)


def _normal(distance: float, spread: float) -> float:
    """The share of a normal distribution below its mean + distance."""
    if spread <= 0.0:
        return float(distance >= 0.0)
    return 0.5 * (1 + math.erf(distance / spread / math.sqrt(2)))
