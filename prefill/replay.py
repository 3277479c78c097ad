"""Replay: what TTFT recent prompts would have had under another token budget and chunk size. Pure.

It runs the packing of the scheduler (first come, first served, at most `chunk_size` of a prompt and `token_budget` in
all per step) over the true arrivals, with predicted durations. A run of equal steps is taken in one go, so the work
depends on the number of prompts, not on that of steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core.step_cost import StepCost, chunk_products


class SeenPrompt(NamedTuple):
    arrived_at: float
    num_tokens: int  # to be computed
    num_cached: int  # in front of them


@dataclass(frozen=True)
class ReplayRules:
    """How prompts are computed. `overlaps`: a step is planned while the one before it still runs.

    A prompt that is not begun `patience_s` after its arrival is given up, as admission does with what must be late.
    """

    token_budget: int
    chunk_size: int
    overlaps: bool = False
    patience_s: float = math.inf


def replay(prompts: Sequence[SeenPrompt], cost: StepCost, rules: ReplayRules) -> list[float]:
    """Seconds from arrival to the end of the step that completes each of `prompts`, which are in order of arrival.

    Infinite for those that were given up.
    """
    return _Replay(prompts, cost, rules).ttfts()


class _Replay:
    def __init__(self, prompts: Sequence[SeenPrompt], cost: StepCost, rules: ReplayRules):
        self._prompts = prompts
        self._cost = cost
        self._rules = rules
        self._left = [prompt.num_tokens for prompt in prompts]
        self._start = [prompt.num_cached for prompt in prompts]
        self._queue: list[int] = []  # those that have begun come first
        self._num_begun = 0  # of the queue
        self._num_arrived = 0
        self._previous_end = self._last_end = -math.inf  # of the last two steps

    def ttfts(self) -> list[float]:
        ttfts = [math.inf] * len(self._prompts)
        while self._queue or self._num_arrived < len(self._prompts):
            planned_at = self._arrive()
            self._give_up(planned_at)
            if not self._queue:
                continue
            planned, is_full = self._plan()
            end = self._run(planned, is_full, planned_at)
            for index, _ in planned:
                if not self._left[index]:
                    ttfts[index] = end - self._prompts[index].arrived_at
            still = [index for index, _ in planned if self._left[index]]
            self._num_begun = len(still) + max(self._num_begun - len(planned), 0)
            self._queue[: len(planned)] = still
        return ttfts

    def _next_arrival(self) -> float:
        return self._prompts[self._num_arrived].arrived_at if self._num_arrived < len(self._prompts) else math.inf

    def _arrive(self) -> float:
        """Queue what has come when the next step is planned, which is at the time returned."""
        planned_at = self._previous_end if self._rules.overlaps else self._last_end
        if not self._queue:
            planned_at = max(planned_at, self._next_arrival())
        while self._next_arrival() <= planned_at:
            self._queue.append(self._num_arrived)
            self._num_arrived += 1
        return planned_at

    def _give_up(self, now: float) -> None:
        num_late = 0
        for index in self._queue[self._num_begun :]:
            if now - self._prompts[index].arrived_at <= self._rules.patience_s:
                break
            num_late += 1
        del self._queue[self._num_begun : self._num_begun + num_late]

    def _plan(self) -> tuple[list[tuple[int, int]], bool]:
        """(prompt, tokens) of the next step, and whether the budget is used up: nobody who comes later could join."""
        planned, budget = [], self._rules.token_budget
        for index in self._queue:
            if budget == 0:
                break
            tokens = min(self._left[index], self._rules.chunk_size, budget)
            planned.append((index, tokens))
            budget -= tokens
        return planned, budget == 0

    def _run(self, planned: list[tuple[int, int]], is_full: bool, planned_at: float) -> float:
        """Run the step, and the equal ones that follow until a prompt is complete or another may join. The end."""
        start = max(planned_at, self._last_end)
        num_steps = min(self._left[index] // tokens for index, tokens in planned)
        if num_steps > 1 and not is_full and self._num_arrived < len(self._prompts):
            num_steps = min(num_steps, self._num_steps_before_arrival(start, self._seconds(planned, 1)))
        previous_end = start + self._seconds(planned, num_steps - 1) if num_steps > 1 else self._last_end
        self._previous_end, self._last_end = previous_end, start + self._seconds(planned, num_steps)
        for index, tokens in planned:
            self._left[index] -= tokens * num_steps
            self._start[index] += tokens * num_steps
        return self._last_end

    def _num_steps_before_arrival(self, start: float, step_s: float) -> int:
        """Of equal steps, the first of which starts then: how many are planned before the next prompt comes."""
        num_steps = math.ceil((self._next_arrival() - start) / max(step_s, 1e-9))
        return max(num_steps + (1 if self._rules.overlaps else 0), 1)

    def _seconds(self, planned: list[tuple[int, int]], num_steps: int) -> float:
        num_tokens, products = 0, 0.0
        for index, tokens in planned:
            num_tokens += tokens * num_steps
            products += chunk_products(self._start[index], tokens * num_steps)
        cost = self._cost
        return cost.base_s * num_steps + cost.per_prompt_token_s * num_tokens + cost.per_product_s * products
