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
prompts (judgement.py), behind the backlog that was there when the first of them came, under neighbouring settings and
takes the one with the fewest over the target and, among equals, the shortest mean TTFT. What cannot be in time is given
up in a replay, so that settings can be told apart under overload, too.
"""

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass

from ..core.step_cost import StepCost, chunk_products
from ..core.tuner_event import TunerEvent
from ..worker.tuning import KNEE_SHARE, Bounds, Setting
from .judgement import Judgement
from .replay import ReplayRules, SeenPrompt

_WINDOW_S = 45.0  # of prompts that are replayed,
_LEAST_PROMPTS = 64  # but so many in any case, that bursts are remembered,
_MOST_PROMPTS = 256  # and no more
_ENOUGH_PROMPTS = 8  # to judge by
_MOST_BACKLOG = 64  # prompts
_JUDGE_IN_S = 1.0  # the replays of one judgement are spread over that
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
    interval_s: float = 3.0  # between changes


class PrefillTuner:
    """`token_budget` and `chunk_size` are for the next plan. Tell it each prompt (`saw`), and `update` it often."""

    def __init__(self, config: PrefillTunerConfig):
        self._config = config
        interval = config.interval_s
        self._budget = Setting("token budget", config.token_budget, config.token_budget_bounds, interval)
        self._chunk = Setting("chunk size", config.chunk_size, config.chunk_size_bounds, interval)
        self._prompts: list[SeenPrompt] = []  # in order of arrival
        self._backlogs: deque[tuple[float, int]] = deque(maxlen=math.ceil(_WINDOW_S / interval) + 1)
        self._judged_at = -math.inf  # when the last judgement began
        self._judgement: Judgement | None = None
        self._updated_at = -math.inf

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
        elapsed, self._updated_at = now - self._updated_at, now
        if self._judgement is not None:
            return self._judge(self._judgement, elapsed, now)
        if now - self._judged_at < self._config.interval_s:
            return []
        self._judged_at = now
        self._backlogs.append((now, num_waiting_tokens))
        del self._prompts[: -self._num_recent(now)]
        if not cost.is_trusted or len(self._prompts) < _ENOUGH_PROMPTS:
            return []
        if self._config.ttft_target_s is None:
            return self._to_the_knee(now, cost)
        target_s = self._config.ttft_target_s - handover_s
        self._judgement = Judgement(self._prompts[:], self._backlog(), cost, target_s, self._candidates(target_s))
        return []

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

    def _judge(self, judgement: Judgement, elapsed: float, now: float) -> list[TunerEvent]:
        """Go on with it, and when it is done, move to what is better."""
        judgement.advance(max(1, math.ceil(judgement.num_settings * min(elapsed / _JUDGE_IN_S, 1.0))))
        if not judgement.is_done:
            return []
        self._judgement = None
        if (better := judgement.better()) is None:
            return []
        rules, reason = better
        events = self._budget.set(rules.token_budget, reason, now), self._chunk.set(rules.chunk_size, reason, now)
        return [event for event in events if event is not None]

    def _candidates(self, target_s: float) -> list[ReplayRules]:
        """The present setting and its neighbours within the bounds, each once."""
        settings = {(self.token_budget, self.chunk_size): None}  # in order
        for step in _STEPS:
            budget = self._budget.bounds.clip(self.token_budget * step)
            settings |= {(budget, self._chunk.bounds.clip(budget * share)): None for share in _CHUNKS}
        return [ReplayRules(budget, chunk, self._config.overlaps, target_s) for budget, chunk in settings]

    def _backlog(self) -> list[SeenPrompt]:
        """What waited when the first of the prompts came, as prompts of their mean length."""
        first = self._prompts[0].arrived_at
        num_tokens = next((tokens for at, tokens in reversed(self._backlogs) if at <= first), 0)
        num_prompts = len(self._prompts)
        mean = -(-sum(prompt.num_tokens for prompt in self._prompts) // num_prompts)
        cached = sum(prompt.num_cached for prompt in self._prompts) // num_prompts
        return [SeenPrompt(first, mean, cached)] * min(num_tokens // mean, _MOST_BACKLOG)


def knee_budget(cost: StepCost, attended: float) -> float:
    """Tokens of the smallest step that reaches KNEE_SHARE of the greatest throughput, each attending to `attended`."""
    per_token_s = cost.per_prompt_token_s + cost.per_product_s * attended
    return KNEE_SHARE / (1 - KNEE_SHARE) * cost.base_s / max(per_token_s, 1e-12)
