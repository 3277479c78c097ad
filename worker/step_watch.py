"""StepWatch: how long the steps of this worker take, and the cost model that follows from it.

A device runs one step after the other. So a step took from its launch, or from the end of the step before it when that
came later, to its own end. Shapes are lengths only.
"""

import math
import time
from collections.abc import Callable

from ..core.step_cost import StepCost, StepShape, StepTotals
from .step_cost_learner import StepCostLearner

_COST_AGE_S = 0.5  # how old the coefficients given out may be: solving for them takes longer than learning a step


class StepWatch:
    """One per worker: all roles share the device. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._learner = StepCostLearner()
        self._launched: dict[int, tuple[StepShape, float]] = {}  # step number |-> shape, when
        self._device_free_at = -math.inf
        self._last_collected = -1
        self._cost = self._learner.cost
        self._solved_at = -math.inf
        self.totals = StepTotals()

    def launched(self, number: int, shape: StepShape) -> None:
        """The device was given a step; `number` names it until it is collected."""
        self._launched[number] = shape, self._clock()

    def collected(self, number: int) -> None:
        """The step is over. Raises KeyError for one that was not launched.

        Each role collects its own steps. Where two were not collected in the order of their launch nobody saw when the
        earlier one ended, so neither is learned from.
        """
        shape, launched_at = self._launched.pop(number)
        now = self._clock()
        seconds = now - max(launched_at, self._device_free_at)
        if number > self._last_collected and all(number < other for other in self._launched):
            self._learner.observe(shape, seconds)
        self.totals = self.totals.plus(shape, seconds)
        self._device_free_at = now
        self._last_collected = max(number, self._last_collected)

    def tried(self, shape: StepShape, seconds: float) -> None:
        """A step was measured that was no request's: it is learned from, and not added up."""
        self._learner.tried(shape, seconds)
        self._solved_at = -math.inf  # what follows is chosen by the cost

    @property
    def learned(self) -> StepCost | None:
        """`cost`, once it comes from steps."""
        return self.cost if self.cost.num_samples else None

    @property
    def cost(self) -> StepCost:
        """What a step costs, as far as it is known; see `StepCost.is_trusted`."""
        now = self._clock()
        if now - self._solved_at >= _COST_AGE_S:
            self._cost, self._solved_at = self._learner.cost, now
        return self._cost
