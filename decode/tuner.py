"""DecodeTuner: how many sequences run at once on a decode worker, and how much prompt a step may carry. Pure.

A step of B sequences that hold S tokens takes `base + per_decode * B + per_context * S`. The n sequences that run now
hold s tokens each (both averaged over some seconds); whoever joins them is of a newcomer's length s':

    step(B) = base + n * (per_decode + per_context * s) + (B - n) * (per_decode + per_context * s')      B >= n

and below n those go that are there: s' is s. The two differ much where a few long answers outlive many short ones.

*The cap* is the largest B whose step stays within the TPOT target less a margin, and what may be lent to a burst:

    step(B) / (1 - r) <= t + max(t - mean step of late, 0)      t = aim * target * (1 - margin); aim: aim.py
                                                                r = prompt tokens per second * per_prompt_token

TPOT is a mean over an answer's life, while who waits for a place misses its TTFT for certain: steps may be longer than
t for as long as they were shorter before. Under steady demand nothing is lent, and they are t. Prompts that are
computed here take the share r of the time, so decodes have what is left. Without a target it is the knee: the smallest
B with 9/10 of the greatest throughput, B = 9 * base / (per_decode + per_context * s'). Either way it is no more than
the pool holds, with some head-room, for preemption computes twice.

*The prompt budget* of a step is what the decodes that run now leave of the target, or what the mean over an answer of
L tokens leaves of it, as one chunk makes the answer longer once:

    max(t - step(running), L * BURST * (t - step(running) / (1 - r))) / per_prompt_token      t = target * (1 - margin)

and without a target what doubles the step. Its lower bound keeps prompts moving however full the batch is. It stays
until steps with prompts have shown what those cost.

A lower target never gives a higher cap: the wanted cap falls with the target, and a Setting moves monotonically with
what is wanted. But a target that one sequence alone would miss is given up, and the cap is the knee: a batch of one
would keep everybody waiting and still miss it.
"""

import math
from dataclasses import dataclass

from ..core.step_cost import LEAST_SAMPLES, TARGET_MARGIN, StepCost, prompt_share_s
from ..core.tuner_event import TunerEvent
from ..worker.tuning import KNEE_SHARE, LEAST_GAIN, Bounds, Setting, in_ms

_LIFE_S = 20.0  # steps are averaged over about an answer's life, for lending
_MEAN_S = 10.0  # running sequences and their context are averaged over
_MOST_PROMPT_SHARE = 0.75  # of the time, that prompts can claim from the decodes
_FULL = 0.8  # of the cap runs: then it is the cap that makes steps long
_SAME = 0.005  # an aim that differs from the target by less is not worth a word
_POOL_SHARE = 0.95  # of the pool is filled by plan
_LOOK_S = 0.1  # between two looks at what is wanted: steps are shorter


@dataclass(frozen=True)
class DecodeTunerConfig:
    """The defaults hold until the costs are known. Bounds of one value force a setting."""

    max_running: int
    prompt_budget: int
    max_running_bounds: Bounds
    prompt_budget_bounds: Bounds
    tpot_target_s: float | None = None
    margin: float = TARGET_MARGIN
    interval_s: float = 1.0  # between changes


@dataclass(frozen=True)
class DecodeLoad:
    """What the worker has to do now. Tokens, but for `num_running`."""

    num_running: int  # sequences that decode
    context: int  # of all of them together
    growth: float  # by which their mean context is expected to rise; 0 in a steady state, where the longest leave
    pool: int  # KV tokens the worker holds in all
    prompts_per_s: float = 0.0  # prompt tokens that are computed here
    answer: float = 0.0  # output tokens of a request, on average; 0: not known yet
    newcomer: float = 0.0  # of a request that joins, on average over its life: prompt and half of the answer; 0: as now
    aim: float = 1.0  # share of the target that steps are planned for (aim.py)


class DecodeTuner:
    """`max_running` and `prompt_budget` are for the next plan. `update` it often; it is cheap."""

    def __init__(self, config: DecodeTunerConfig):
        self._config = config
        interval = config.interval_s
        self._cap = Setting("cap", config.max_running, config.max_running_bounds, interval)
        self._prompts = Setting("prompt budget", config.prompt_budget, config.prompt_budget_bounds, interval)
        self._updated_at: float | None = None
        self._context = 0.0  # mean of one running sequence
        self._running = 0.0
        self._step: float | None = None  # mean over _LIFE_S
        self._looked_at = -math.inf

    @property
    def max_running(self) -> int:
        return self._cap.value

    @property
    def prompt_budget(self) -> int:
        return self._prompts.value

    def update(self, now: float, cost: StepCost, load: DecodeLoad) -> list[TunerEvent]:
        """Change the settings where that gains enough; what changed."""
        elapsed = self._average(now, load)
        if not cost.is_trusted or self._context == 0.0:
            return []
        self._average_step(elapsed, cost)
        if now - self._looked_at < _LOOK_S:
            return []
        self._looked_at = now
        events = []
        if self._cap.may_change(now):
            wanted, reason, is_late = self._wanted_cap(cost, load)
            events.append(self._cap.towards(wanted, reason, now, is_late=is_late))
        if self._prompts.may_change(now) and cost.num_prompt_samples >= LEAST_SAMPLES:
            events.append(self._prompts.towards(*self._wanted_prompts(cost, load), now))
        return [event for event in events if event is not None]

    def _average_step(self, elapsed: float, cost: StepCost) -> None:
        step = cost.base_s + self._running * (cost.per_decode_s + cost.per_context_s * self._context)
        before = step if self._step is None else self._step
        self._step = before + min(elapsed / _LIFE_S, 1.0) * (step - before)

    def _average(self, now: float, load: DecodeLoad) -> float:
        """Running means; a worker without work has no context: the last one is kept. Seconds since the last call."""
        elapsed = now - self._updated_at if self._updated_at is not None else _MEAN_S
        self._updated_at = now
        rate = min(elapsed / _MEAN_S, 1.0)
        self._running += rate * (load.num_running - self._running)
        if load.num_running:
            context = load.context / load.num_running
            self._context += (rate if self._context else 1.0) * (context - self._context)
        return elapsed

    # ---- the cap -------------------------------------------------------------------------------------------------

    def _wanted_cap(self, cost: StepCost, load: DecodeLoad) -> tuple[float, str, bool]:
        """The cap that should be, why, and whether the present one is used and eats into the margin."""
        context = self._context + load.growth
        newcomer = load.newcomer or context
        cap, reason, is_late = self._cap_by_time(cost, context, newcomer, load)
        fitting = _Line(self._running, 0.0, context, newcomer).count(_POOL_SHARE * load.pool)
        if fitting < cap:
            return fitting, f"the pool holds {int(fitting)} sequences of {context:.0f} tokens", is_late
        return cap, reason, is_late

    def _cap_by_time(
        self, cost: StepCost, context: float, newcomer: float, load: DecodeLoad
    ) -> tuple[float, str, bool]:
        present_s, newcomer_s = (cost.per_decode_s + cost.per_context_s * tokens for tokens in (context, newcomer))
        target = self._config.tpot_target_s
        knee = KNEE_SHARE / (1 - KNEE_SHARE) * cost.base_s / max(newcomer_s, 1e-12)
        if target is None:
            return knee, f"{KNEE_SHARE:.0%} of the greatest throughput needs {knee:.0f} sequences", False
        if (alone := cost.base_s + newcomer_s) > target:
            return knee, f"the {in_ms(target)} target cannot be held: one alone takes {in_ms(alone)}", False
        free = _free(cost, load.prompts_per_s)
        line = _Line(self._running, cost.base_s, present_s, newcomer_s)
        aimed = target * load.aim
        # Below what is hardly longer than the step of one alone, fewer gain nothing.
        least = min((1 + LEAST_GAIN) * alone / free, target)
        within = max(aimed * (1 - self._config.margin), least)
        aimed = max(aimed, within)
        lent = max(within - (self._step or within) / free, 0.0)
        step, limit = line.total(self._cap.value) / free, aimed + lent
        relation = "over" if step > limit else "close to" if step > within + lent else "below"
        reason = f"predicted step {in_ms(step)} {relation} {_in_words(aimed, target)}"
        if lent:
            reason += f" and {in_ms(lent)} that late steps have left of it"
        is_late = step > (within + aimed) / 2 + lent and self._running > _FULL * self._cap.value
        return line.count((within + lent) * free), reason, is_late

    # ---- prompts in mixed steps ----------------------------------------------------------------------------------

    def _wanted_prompts(self, cost: StepCost, load: DecodeLoad) -> tuple[float, str]:
        """Tokens of prompt in a step, and why."""
        per_sequence = cost.per_decode_s + cost.per_context_s * self._context
        step = cost.base_s + per_sequence * self._running
        target = self._config.tpot_target_s
        if target is None:
            left = step
            reason = f"without a TPOT target prompts may double a step, and decodes take {in_ms(step)} of it"
        else:
            within = target * (1 - self._config.margin)
            mean = step / _free(cost, load.prompts_per_s)
            left = prompt_share_s(within, step, mean, load.answer)
            reason = (
                f"a step takes {in_ms(step)} for its decodes and with the prompts of late {in_ms(mean)} on average, "
                f"which leaves {in_ms(max(left, 0.0))} of the {in_ms(target)} TPOT target to a step's prompts"
            )
        return left / max(cost.per_prompt_token_s, 1e-12), reason


def _in_words(aimed: float, target: float) -> str:
    share = aimed / target
    text = f"the {in_ms(target)} target"
    return text if abs(share - 1.0) < _SAME else f"{in_ms(aimed)}, {share:.0%} of {text}"


def _free(cost: StepCost, prompts_per_s: float) -> float:
    """The share of the time that prompts leave to decodes."""
    return 1.0 - min(prompts_per_s * cost.per_prompt_token_s, _MOST_PROMPT_SHARE)


@dataclass(frozen=True)
class _Line:
    """A total that grows with the number of sequences: by `present` for those that are there, then by `newcomer`."""

    num_present: float
    base: float
    present: float
    newcomer: float

    def total(self, count: float) -> float:
        num_new = max(count - self.num_present, 0.0)
        return self.base + (count - num_new) * self.present + num_new * self.newcomer

    def count(self, total: float) -> float:
        """The largest number of sequences with that total or less; negative where `base` is more than that."""
        room = total - self.total(self.num_present)
        return self.num_present + room / max(self.newcomer if room > 0.0 else self.present, 1e-12)
