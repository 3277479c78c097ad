"""DecodePacing: the tuner of a decode worker at work on its scheduler, and the load it must know. Pure.

sim/ drives the same.
"""

import math

from ..core.config import SchedulerConfig
from ..core.step_cost import StepCost, StepShape
from ..core.tuner_event import TunerEvent
from ..worker.tuning import Bounds
from .aim import Aim
from .scheduler import DecodeScheduler
from .tuner import DecodeLoad, DecodeTuner, DecodeTunerConfig

_RATE_S = 10.0  # the rate of prompt tokens is that of so long
_MEAN_ENDS = 64  # answers that their mean length is taken over


class DecodePacing:
    """Moves the scheduler's cap on running sequences and its prompt budget within the config's ranges."""

    def __init__(self, config: SchedulerConfig, scheduler: DecodeScheduler, pool_tokens: int):
        self._scheduler = scheduler
        self._pool_tokens = pool_tokens
        self._tuner: DecodeTuner | None = None
        if config.token_budget_range is not None and config.max_running_range is not None:
            self._tuner = DecodeTuner(
                DecodeTunerConfig(
                    max_running=config.max_running,
                    prompt_budget=config.token_budget,
                    max_running_bounds=Bounds(*config.max_running_range),
                    prompt_budget_bounds=Bounds(*config.token_budget_range),
                    tpot_target_s=config.tpot_target_s,
                )
            )
        low, high = config.token_budget_range or (0, 0)
        self._token_budget = config.token_budget
        self._is_budget_fixed = low == high
        self._aim = Aim(config.tpot_target_s)
        self._shape = StepShape()  # of the last step
        self._prompts_per_s = 0.0
        self._launched_at = -math.inf
        self._newcomer = 0.0  # tokens that a request holds, on average over its life
        self._answer = 0.0  # output tokens of a request, on average
        self._num_ends = 0

    @property
    def settings(self) -> dict[str, int]:
        prompts = self._scheduler.prompt_budget
        budget = {"token budget": self._token_budget} if prompts is None else {"prompt budget": prompts}
        return {"cap": self._scheduler.max_running} | budget

    def launched(self, shape: StepShape, now: float) -> None:
        """A step of that shape was given to the device."""
        elapsed = min(now - self._launched_at, _RATE_S)
        keep = math.exp(-elapsed / _RATE_S)
        self._prompts_per_s = keep * self._prompts_per_s + shape.num_prompt_tokens / _RATE_S
        self._shape, self._launched_at = shape, now

    def ended(self, num_prompt_tokens: int, num_output_tokens: int, tpot_s: float | None) -> None:
        """A request has left with so many tokens; each but the first took `tpot_s`, None where there is no other."""
        self._aim.ended(tpot_s, self._shape.num_decodes, self._scheduler.max_running)
        self._num_ends = min(self._num_ends + 1, _MEAN_ENDS)
        self._newcomer += (num_prompt_tokens + num_output_tokens / 2 - self._newcomer) / self._num_ends
        self._answer += (num_output_tokens - self._answer) / self._num_ends

    def update(self, now: float, cost: StepCost) -> list[TunerEvent]:
        """Before a plan: the settings it is made with; what changed."""
        if self._tuner is None:
            return []
        load = DecodeLoad(
            num_running=self._shape.num_decodes,
            context=self._shape.decode_context,
            growth=0.0,  # in a steady state as many leave with long contexts as come with short ones
            pool=self._pool_tokens,
            prompts_per_s=self._prompts_per_s,
            answer=self._answer,
            newcomer=self._newcomer,
            aim=self._aim.share,
        )
        events = self._tuner.update(now, cost, load)
        self._scheduler.max_running = self._tuner.max_running
        if not self._is_budget_fixed:
            self._scheduler.prompt_budget = self._tuner.prompt_budget
        return events
