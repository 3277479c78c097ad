"""Capacity: how many requests per second a fleet can take with both targets kept, by how its workers are divided. Pure.

k workers compute prompts only; the m others decode, and compute the share x of the prompts themselves. With
    p    seconds that a prompt's tokens take       d   seconds that one sequence adds to a decode step
    L    tokens of an answer                       r   requests per second
a worker that decodes has r/m * (x*p + L*d) of its time taken by what grows with the load, and the rest is left for the
fixed cost of its steps, so that (with Little's law for how many run at once)

    step = base / (1 - r/m * (x*p + L*d))          running = r/m * L * step          mixed = base + running * d

TPOT    mixed, and late by the prompts that come during an answer: a Poisson number, mean r/m * x * L * step, times the
        probability that all other decode workers are busy too, for prompts go where nobody decodes. One prompt may
        be more than an answer can spare over all its tokens; the sum of the others is taken as normal
TTFT    the rest of the step that runs, if all decode workers are busy; the wait; the prompt's own steps, as many as the
        chunk size makes of it, each with `mixed` where decodes run beside it; and on the k workers the hand-over, and
        what is left of a prompt that the decode worker is at.
        The wait is that of k (or m) servers at one queue, Poisson arrivals, services of that mean and mean square:
        P(wait > t) = busy * exp(-t / mean wait of those who wait), busy = load ** (sqrt(2 (n + 1)) - 1)
        (Sakasegawa, 1977). Whoever would be late is refused unless its wait is short (admission.py), so the load is
        that of the others. Who would be late on one side goes to the other, as far as x allows.

x is the best one, but not less than the share that finds the k workers busy (Erlang's loss formula) and the others
free, less so the closer what the prompt costs the decodes is to the wait, as the router weighs them (ways.py).

A rate is kept when a share of the requests keeps both targets. The model is rough: workers are alike, arrivals Poisson,
steps linear in what they hold. It is used to compare divisions, not to refuse anybody.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from ..core.step_cost import TARGET_MARGIN, StepCost, prompt_share_s
from .admission import LEAST_PATIENCE
from .forecast import Speed, Work

KEPT = 0.9  # of the requests keep each target
_POOL_SHARE = 0.95  # of a pool is filled by plan
_LOCAL_SHARES = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
_HALVINGS = 10
_REFUSALS = 3  # times that who is refused is worked out from the load that the others are
_FULL = 0.98  # load of a line that refuses
_LEAST_CHUNK = 128  # tokens; however full a step is, prompts go on


class PromptClass(NamedTuple):
    """Prompts of about one size: their share of all, what is computed of one, and its length."""

    share: float
    work: Work
    num_tokens: float


class Mix(NamedTuple):
    """What requests are like of late. `answers`: lengths, each that of as many as the others; at least one.

    `error`: by what share the mean of so few prompts is off, the standard error of what is computed of them.
    """

    prompts: tuple[PromptClass, ...]
    answers: tuple[float, ...]
    error: float = 0.0

    @property
    def answer_tokens(self) -> float:
        return sum(self.answers) / len(self.answers)


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
    """What capacities follow from. `transfer_s`: per token; `overhead_s`: of first tokens, beside what steps take.

    `may_be_local`: prompts may be computed where they are decoded, although there are workers for prompts.
    """

    mix: Mix
    machine: Machine
    targets: Targets
    transfer_s: float = 0.0
    overhead_s: float = 0.0
    may_be_local: bool = True


class _Line(NamedTuple):
    """`num_servers` at one queue, whose services have these moments."""

    num_servers: int
    rate: float
    mean_s: float
    mean_square: float

    @classmethod
    def of(cls, num_servers: int, rate: float, services: Sequence[tuple[float, float]]) -> "_Line":
        """`services`: (share, seconds); who is not here is no share."""
        mean_s = sum(share * seconds for share, seconds in services)
        return cls(num_servers, rate, mean_s, sum(share * seconds**2 for share, seconds in services))

    def in_time(self, patience_s: float) -> float:
        """The share that waits no longer than that."""
        load = self.load
        if load >= 1.0 or patience_s < 0.0:
            return 0.0
        if load == 0.0:
            return 1.0
        busy = math.pow(load, math.sqrt(2 * (self.num_servers + 1)) - 1)
        waiting_s = self.rest_s / (self.num_servers * (1 - load))
        return 1.0 - busy * math.exp(-patience_s / waiting_s)

    @property
    def load(self) -> float:
        return self.rate * self.mean_s / self.num_servers

    @property
    def rest_s(self) -> float:
        """What is left of a service that is found running, on average."""
        return self.mean_square / (2 * self.mean_s) if self.mean_s else 0.0

    def thinned(self) -> "_Line":
        """With no more load than can be served."""
        keep = min(_FULL / self.load, 1.0) if self.load else 1.0
        return self._replace(mean_s=keep * self.mean_s, mean_square=keep * self.mean_square)


def mean_machine(speeds: Collection[Speed], decoding: Collection[Speed], pool_tokens: int) -> Machine:
    """The mean of what is known of several; there must be one, and one that decodes.

    What decodes cost is known to those that are `decoding`. A worker that computes prompts only goes on learning what
    its steps cost, and what it once learned of decodes drifts with that, to many times the truth.
    """
    cost = StepCost(
        base_s=fmean(speed.cost.base_s for speed in decoding),
        per_prompt_token_s=fmean(speed.cost.per_prompt_token_s for speed in speeds),
        per_product_s=fmean(speed.cost.per_product_s for speed in speeds),
        per_decode_s=fmean(speed.cost.per_decode_s for speed in decoding),
        per_context_s=fmean(speed.cost.per_context_s for speed in decoding),
    )
    join_steps = fmean(speed.join_steps for speed in speeds)
    return Machine(cost, join_steps, max(speed.chunk_size for speed in speeds), pool_tokens)


def idle_share(num_prefill: int, num_decode: int, outlook: Outlook) -> float:
    """Of the requests, that keep each target where no other is there: prompts may be too long for it."""
    return _Division(num_prefill, num_decode, outlook).share_kept(0.0)


def capacity(num_prefill: int, num_decode: int, outlook: Outlook, kept_share: float = KEPT) -> float:
    """Requests per second of which `kept_share` keep both targets, 0.0 if not even of few. `num_decode`: 1 at least."""
    division = _Division(num_prefill, num_decode, outlook)
    kept, lost = 0.0, division.greatest_rate
    for _ in range(_HALVINGS):
        middle = (kept + lost) / 2
        if division.keeps(middle, kept_share):
            kept = middle
        else:
            lost = middle
    return kept


class _Prompt(NamedTuple):
    """Prompts of about one size, on an idle worker. `lag_s`: of the hand-over, behind the last step."""

    share: float
    num_tokens: int
    seconds: float  # of its tokens
    lag_s: float


class _Load(NamedTuple):
    """Of one decode worker, at some rate and local share."""

    rate: float  # of the whole fleet
    local: float
    step_s: float  # mean
    mixed_s: float  # of a step without prompts
    all_busy: float  # the probability that all decode workers decode
    others_busy: float  # that all but one do


class _Division:
    """One way to divide the workers, under one outlook."""

    def __init__(self, num_prefill: int, num_decode: int, outlook: Outlook):
        self._num_prefill, self._num_decode, self._outlook = num_prefill, num_decode, outlook
        cost = outlook.machine.cost
        self._base_s = cost.base_s
        self._prompts = sorted((self._of(prompt) for prompt in outlook.mix.prompts), key=lambda p: p.seconds)
        self._seconds = [prompt.seconds for prompt in self._prompts]
        # Of the shortest prompts, by how many classes: their share, mean and mean square
        self._shares = [0.0, *accumulate(prompt.share for prompt in self._prompts)]
        self._means = [0.0, *accumulate(prompt.share * prompt.seconds for prompt in self._prompts)]
        self._squares = [0.0, *accumulate(prompt.share * prompt.seconds**2 for prompt in self._prompts)]
        self._mean_s = self._means[-1]
        # What is left of a prompt that is found running, on average
        self._rest_s = self._squares[-1] / (2 * self._mean_s) if self._mean_s else 0.0
        prompt_tokens = sum(prompt.share * prompt.num_tokens for prompt in outlook.mix.prompts)
        self._answer = outlook.mix.answer_tokens
        self._context = prompt_tokens + self._answer / 2
        self._decode_s = cost.per_decode_s + cost.per_context_s * self._context

    def _of(self, prompt: PromptClass) -> _Prompt:
        cost, work, transfer_s = self._outlook.machine.cost, prompt.work, self._outlook.transfer_s
        seconds = cost.per_prompt_token_s * work.num_tokens + cost.per_product_s * work.products
        last_chunk = min(work.num_tokens, self._outlook.machine.chunk_size)
        lag_s = max(work.num_tokens * transfer_s - seconds, last_chunk * transfer_s)
        return _Prompt(prompt.share, work.num_tokens, seconds, lag_s)

    @property
    def greatest_rate(self) -> float:
        """No more can be computed, whatever the targets."""
        seconds = self._mean_s + self._answer * self._decode_s
        return (self._num_prefill + self._num_decode) / max(seconds, 1e-9)

    def keeps(self, rate: float, kept_share: float) -> bool:
        return any(self._share_kept(rate, local) >= kept_share for local in self._locals(rate))

    def share_kept(self, rate: float) -> float:
        """Of the requests, at the best share of prompts that are computed where they are decoded."""
        return max(self._share_kept(rate, local) for local in self._locals(rate))

    def _locals(self, rate: float) -> Iterator[float]:
        """Shares of local prompts that the router may come to."""
        if not self._num_prefill:
            yield 1.0
            return
        if not self._outlook.may_be_local:
            yield 0.0
            return
        yield (least := self._least_local(rate))
        yield from (share for share in _LOCAL_SHARES if share > least)

    def _least_local(self, rate: float) -> float:
        load = self._load(rate, 0.0)
        if load is None:
            return 0.0
        spare_s = (self._outlook.targets.tpot_s - load.step_s) * self._answer
        weight = min(self._mean_s / spare_s, 1.0) if spare_s > 0.0 else 1.0
        running = rate / self._num_decode * self._answer * load.step_s
        lost_s = weight * self._mean_s * (running + 1)
        if lost_s >= self._rest_s:
            return 0.0
        offered, busy = rate * self._mean_s, 1.0
        for servers in range(1, self._num_prefill + 1):
            busy = offered * busy / (servers + offered * busy)
        taken = rate / self._num_decode * (busy * self._mean_s + self._answer * self._decode_s)
        return busy * max(1.0 - taken, 0.0) * (1.0 - lost_s / self._rest_s)

    def _load(self, rate: float, local: float) -> _Load | None:
        """None: more than there is time or memory for."""
        per_worker = rate / self._num_decode
        taken = per_worker * (local * self._mean_s + self._answer * self._decode_s)
        if taken >= 1.0:
            return None
        step_s = self._base_s / (1 - taken)
        running = per_worker * self._answer * step_s
        if running * self._context > _POOL_SHARE * self._outlook.machine.pool_tokens:
            return None
        busy, mixed_s = 1.0 - math.exp(-running), self._base_s + running * self._decode_s
        return _Load(rate, local, step_s, mixed_s, busy**self._num_decode, busy ** (self._num_decode - 1))

    def _share_kept(self, rate: float, local: float) -> float:
        load = self._load(rate, local)
        return 0.0 if load is None else self._in_tpot(load) * self._in_ttft(load)

    # ---- TPOT ----------------------------------------------------------------------------------------------------

    def _in_tpot(self, load: _Load) -> float:
        left_s = self._outlook.targets.tpot_s - load.mixed_s
        if left_s < 0.0:
            return 0.0
        rate = load.rate / self._num_decode * load.local * load.others_busy
        answers = self._outlook.mix.answers
        return sum(self._spares(left_s * length, rate * length * load.step_s) for length in answers) / len(answers)

    def _spares(self, spare_s: float, num_met: float) -> float:
        """The share of answers that have so much to spare for so many prompts, on average."""
        small = bisect_right(self._seconds, spare_s)
        none_large = math.exp(-num_met * (self._shares[-1] - self._shares[small]))
        spread_s = math.sqrt(num_met * self._squares[small])
        return none_large * _normal(spare_s - num_met * self._means[small], spread_s)

    # ---- TTFT ----------------------------------------------------------------------------------------------------

    def _in_ttft(self, load: _Load) -> float:
        local, left_s = load.local, self._outlook.targets.ttft_s - self._outlook.overhead_s
        join_s = self._outlook.machine.join_steps * load.mixed_s
        here = self._services(self._decode_chunk(load), load.mixed_s)
        there = self._services(self._outlook.machine.chunk_size, self._base_s)
        patience_s = left_s - load.all_busy * join_s
        here_line = self._line(self._num_decode, local, load.rate, here, patience_s)
        there_line = self._line(self._num_prefill, 1 - local, load.rate, there, patience_s)
        # What is left of a prompt's step, and as much again, for the step behind it often holds a prompt too.
        held, held_s = (min(here_line.load, 1.0), 2 * here_line.rest_s) if here_line else (0.0, 0.0)
        either = in_here = in_there = 0.0
        for prompt, (_, here_s), (_, there_s) in zip(self._prompts, here, there, strict=True):
            handed_s = left_s - there_s - prompt.lag_s
            a = _joined(here_line, left_s - here_s, join_s, load.all_busy)
            b = _joined(there_line, handed_s, join_s, load.all_busy)
            lost = held * max(b - _joined(there_line, handed_s - held_s, join_s, 1.0), 0.0)
            either += prompt.share * (a + b - a * b - (1 - local) * lost)
            in_here += prompt.share * a
            in_there += prompt.share * (b - lost)
        served = local * self._served(self._num_decode, local * load.rate, here)
        served += (1 - local) * self._served(self._num_prefill, (1 - local) * load.rate, there)
        return min(either, min(local, in_here) + min(1 - local, in_there), served)

    def _served(self, num_servers: int, rate: float, services: list[tuple[float, float]]) -> float:
        """The share that there is time for, whoever is refused: how many are is worked out roughly."""
        offered = _Line.of(num_servers, rate, services).load if rate else 0.0
        return 1.0 / max(offered, 1.0)

    def _decode_chunk(self, load: _Load) -> float:
        """Prompt tokens of a step there, as a decode worker's tuner will choose."""
        within_s = self._outlook.targets.tpot_s * (1 - TARGET_MARGIN)
        share_s = prompt_share_s(within_s, load.mixed_s, load.step_s, self._answer)
        return max(share_s / max(self._outlook.machine.cost.per_prompt_token_s, 1e-12), _LEAST_CHUNK)

    def _services(self, chunk: float, fixed_s: float) -> list[tuple[float, float]]:
        """(share, seconds) of each class of prompts, in steps of so many tokens."""
        return [(p.share, p.seconds + fixed_s * max(math.ceil(p.num_tokens / chunk), 1)) for p in self._prompts]

    def _line(
        self, num_servers: int, local: float, rate: float, services: list[tuple[float, float]], left_s: float
    ) -> _Line | None:
        """Of those that are not refused, of the share `local` of the requests; None: nobody comes."""
        if not local:
            return None
        line, taken = _Line.of(num_servers, local * rate, services), [1.0] * len(services)
        least_s = LEAST_PATIENCE * self._outlook.targets.ttft_s
        for _ in range(_REFUSALS if rate else 0):
            # Half way each time: who is refused makes the line shorter, which others are not refused for.
            thinned = line.thinned()
            in_time = [thinned.in_time(max(left_s - seconds, least_s)) for _, seconds in services]
            taken = [(before + now) / 2 for before, now in zip(taken, in_time, strict=True)]
            there = [(share * part, seconds) for part, (share, seconds) in zip(taken, services, strict=True)]
            line = _Line.of(num_servers, local * rate, there)
        return line


def _joined(line: _Line | None, left_s: float, join_s: float, busy: float) -> float:
    """The share in time, if the share `busy` must let a step end first. No line: nobody goes there."""
    if line is None:
        return 0.0
    return (1 - busy) * line.in_time(left_s) + busy * line.in_time(left_s - join_s)


def _normal(distance: float, spread: float) -> float:
    """The share of a normal distribution below its mean + distance."""
    if spread <= 0.0:
        return float(distance >= 0.0)
    return 0.5 * (1 + math.erf(distance / spread / math.sqrt(2)))
