"""PrefillTuner: token budget and chunk size of a prefill worker, chosen from its own traffic and its own costs. Pure.

A step of b tokens takes base + t * b, t being the time per token at the attention that prompts need of late:

    t = per_prompt_token + per_product * (products of recent prompts / their tokens)

*Without a target* the budget is the knee of throughput against latency: the smallest that reaches 9/10 of the greatest
throughput 1 / t,

    b / (base + t * b) >= 9/10 * 1/t      <=>      b >= 9 * base / t

and a chunk may fill it.

*With a TTFT target* two forces pull. A large budget pays `base` less often, which shortens every queue. A small one
ends its steps sooner: who comes waits less for the step that runs, short prompts are not held back by what shares their
step, and with chunks smaller than the budget they pass a long one. Which wins depends on how full the worker is and on
how lengths mix, so no formula in rates holds through bursts. The tuner asks the traffic itself: it replays the last
prompts (replay.py), behind the backlog that was there when the first of them came, under neighbouring settings and
takes the one with the fewest over the target and, among equals, the shortest mean TTFT. Where all are late, that is the
one of greatest throughput.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..core.step_cost import StepCost, chunk_products
from ..core.tuner_event import TunerEvent
from ..worker.tuning import KNEE_SHARE, LEAST_GAIN, Bounds, Setting, in_ms, is_trusted
from .replay import SeenPrompt, replay

_WINDOW_S = 30.0  # of prompts that are replayed,
_LEAST_PROMPTS = 32  # but so many in any case, that bursts are remembered,
_MOST_PROMPTS = 128  # and no more
_ENOUGH_PROMPTS = 8  # to judge by
_LEAST_FEWER = 0.01  # of the prompts; a smaller difference in how many are late is chance
_MOST_BACKLOG = 64  # prompts
_STEPS = (0.25, 0.5, 1.0, 2.0, 4.0)  # budgets tried, in times of the present one
_CHUNKS = (1.0, 0.5, 0.25)  # chunk sizes tried, in times of the budget


@dataclass(frozen=True)
class PrefillTunerConfig:
    """The defaults hold until the costs are known. Bounds of one value force a setting."""

    token_budget: int
    chunk_size: int
    token_budget_bounds: Bounds
    chunk_size_bounds: Bounds
    ttft_target_s: float | None = None
    overlaps: bool = False  # the worker plans a step while the one before it runs
    interval_s: float = 2.0  # between changes


@dataclass(frozen=True)
class _Outcome:
    """What a replay gave."""

    token_budget: int
    chunk_size: int
    num_prompts: int
    num_late: int
    mean_s: float

    @property
    def rank(self) -> tuple[int, float]:
        return self.num_late, self.mean_s

    def gains_over(self, other: "_Outcome") -> bool:
        """A tenth fewer are late, or none more and the mean is a tenth shorter."""
        fewer = other.num_late - self.num_late
        if fewer > 0 and fewer >= max(LEAST_GAIN * other.num_late, _LEAST_FEWER * self.num_prompts):
            return True
        return fewer >= 0 and self.mean_s <= (1 - LEAST_GAIN) * other.mean_s


class PrefillTuner:
    """`token_budget` and `chunk_size` are for the next plan. Tell it each prompt (`saw`), and `update` it often."""

    def __init__(self, config: PrefillTunerConfig):
        self._config = config
        interval = config.interval_s
        self._budget = Setting("token budget", config.token_budget, config.token_budget_bounds, interval)
        self._chunk = Setting("chunk size", config.chunk_size, config.chunk_size_bounds, interval)
        self._prompts: list[SeenPrompt] = []  # in order of arrival
        self._backlogs: deque[tuple[float, int]] = deque(maxlen=math.ceil(_WINDOW_S / interval) + 1)
        self._judged_at = -math.inf

    @property
    def token_budget(self) -> int:
        return self._budget.value

    @property
    def chunk_size(self) -> int:
        return self._chunk.value

    def saw(self, arrived_at: float, num_tokens: int, num_cached: int) -> None:
        """A prompt that came at that time lacks `num_tokens` behind `num_cached`; known when its blocks are found."""
        if num_tokens > 0:
            insort(self._prompts, SeenPrompt(arrived_at, num_tokens, num_cached))
        if len(self._prompts) > 2 * _MOST_PROMPTS:
            del self._prompts[:-_MOST_PROMPTS]

    def update(self, now: float, cost: StepCost, num_waiting_tokens: int, handover_s: float = 0.0) -> list[TunerEvent]:
        """Change the settings where that gains enough; what changed. At most one move in `interval_s`, else cheap.

        `num_waiting_tokens` are accepted and not computed. `handover_s` is what comes between the last prompt step and
        the first token: it counts against the target.
        """
        if now - self._judged_at < self._config.interval_s:
            return []
        self._judged_at = now
        self._backlogs.append((now, num_waiting_tokens))
        if not is_trusted(cost):
            return []
        del self._prompts[: -self._num_recent(now)]
        if len(self._prompts) < _ENOUGH_PROMPTS:
            return []
        if self._config.ttft_target_s is None:
            return self._to_the_knee(now, cost)
        return self._to_the_best(now, cost, self._config.ttft_target_s - handover_s)

    def _num_recent(self, now: float) -> int:
        num_in_window = sum(1 for prompt in self._prompts if now - prompt.arrived_at <= _WINDOW_S)
        return min(max(num_in_window, _LEAST_PROMPTS), _MOST_PROMPTS)

    # ---- without a target ----------------------------------------------------------------------------------------

    def _to_the_knee(self, now: float, cost: StepCost) -> list[TunerEvent]:
        num_tokens = sum(prompt.num_tokens for prompt in self._prompts)
        products = sum(chunk_products(prompt.num_cached, prompt.num_tokens) for prompt in self._prompts)
        knee = knee_budget(cost, products / num_tokens)
        reason = f"{KNEE_SHARE:.0%} of the greatest throughput needs {knee:.0f} tokens a step"
        events = [self._budget.towards(knee, reason, now)]
        if events[0] is not None:
            events.append(self._chunk.set(self._budget.value, "as much as the token budget", now))
        return [event for event in events if event is not None]

    # ---- with a target -------------------------------------------------------------------------------------------

    def _to_the_best(self, now: float, cost: StepCost, target_s: float) -> list[TunerEvent]:
        backlog = self._backlog()
        outcomes = [self._outcome(backlog, cost, target_s, *setting) for setting in self._candidates()]
        present, best = outcomes[0], min(outcomes, key=lambda outcome: outcome.rank)
        if not best.gains_over(present):
            return []
        reason = self._reason(present, best, target_s)
        events = (
            self._budget.set(best.token_budget, reason, now),
            self._chunk.set(best.chunk_size, reason, now),
        )
        return [event for event in events if event is not None]

    def _candidates(self) -> Iterator[tuple[int, int]]:
        """The present setting and its neighbours within the bounds, each once."""
        yield self.token_budget, self.chunk_size
        seen = {(self.token_budget, self.chunk_size)}
        for step in _STEPS:
            budget = self._budget.bounds.clip(self.token_budget * step)
            for share in _CHUNKS:
                setting = budget, self._chunk.bounds.clip(budget * share)
                if setting not in seen:
                    seen.add(setting)
                    yield setting

    def _backlog(self) -> list[SeenPrompt]:
        """What waited when the first of the prompts came, as prompts of their mean length."""
        first = self._prompts[0].arrived_at
        num_tokens = next((tokens for at, tokens in reversed(self._backlogs) if at <= first), 0)
        num_prompts = len(self._prompts)
        mean = -(-sum(prompt.num_tokens for prompt in self._prompts) // num_prompts)
        cached = sum(prompt.num_cached for prompt in self._prompts) // num_prompts
        return [SeenPrompt(first, mean, cached)] * min(num_tokens // mean, _MOST_BACKLOG)

    def _outcome(
        self, backlog: list[SeenPrompt], cost: StepCost, target_s: float, token_budget: int, chunk_size: int
    ) -> _Outcome:
        ttfts = replay(
            [*backlog, *self._prompts],
            cost,
            token_budget=token_budget,
            chunk_size=chunk_size,
            overlaps=self._config.overlaps,
        )[len(backlog) :]
        num_late = sum(1 for ttft in ttfts if ttft > target_s)
        return _Outcome(token_budget, chunk_size, len(ttfts), num_late, sum(ttfts) / len(ttfts))

    def _reason(self, present: _Outcome, best: _Outcome, target_s: float) -> str:
        of_late = f"of the last {len(self._prompts)} prompts"
        if best.num_late != present.num_late:
            target = in_ms(target_s)
            return f"{best.num_late} instead of {present.num_late} {of_late} would be over the {target} target"
        return f"the mean TTFT {of_late} would be {in_ms(best.mean_s)} instead of {in_ms(present.mean_s)}"


def knee_budget(cost: StepCost, attended: float) -> float:
    """Tokens of the smallest step that reaches KNEE_SHARE of the greatest throughput, each attending to `attended`."""
    per_token_s = cost.per_prompt_token_s + cost.per_product_s * attended
    return KNEE_SHARE / (1 - KNEE_SHARE) * cost.base_s / max(per_token_s, 1e-12)
