"""PrefillPacing: the tuner of a prefill worker at work on its scheduler. Pure; sim/ drives the same."""

from ..core.config import SchedulerConfig
from ..core.step_cost import StepCost
from ..core.tuner_event import TunerEvent
from ..worker.tuning import Bounds, forced
from .scheduler import PrefillScheduler
from .tuner import PrefillTuner, PrefillTunerConfig


class PrefillPacing:
    """Moves the scheduler's token budget and chunk size within the config's range; without one they stay."""

    def __init__(self, config: SchedulerConfig, scheduler: PrefillScheduler, *, overlaps: bool):
        self._scheduler = scheduler
        self._tuner: PrefillTuner | None = None
        if config.token_budget_range is not None:
            budgets = Bounds(*config.token_budget_range)
            is_fixed = budgets.low == budgets.high
            self._tuner = PrefillTuner(
                PrefillTunerConfig(
                    token_budget=config.token_budget,
                    chunk_size=config.chunk_size,
                    token_budget_bounds=budgets,
                    chunk_size_bounds=forced(config.chunk_size) if is_fixed else budgets,
                    ttft_target_s=config.ttft_target_s,
                    overlaps=overlaps,
                )
            )

    @property
    def settings(self) -> dict[str, int]:
        return {"token budget": self._scheduler.token_budget, "chunk size": self._scheduler.chunk_size}

    def saw(self, arrived_at: float, num_tokens: int, num_cached: int) -> None:
        """A prompt that came at that time has its blocks: it lacks `num_tokens` behind `num_cached`."""
        if self._tuner is not None:
            self._tuner.saw(arrived_at, num_tokens, num_cached)

    def update(self, now: float, cost: StepCost) -> list[TunerEvent]:
        """Before a plan: the settings it is made with; what changed."""
        if self._tuner is None:
            return []
        events = self._tuner.update(now, cost, self._scheduler.num_waiting_tokens)
        if events:
            self._scheduler.token_budget, self._scheduler.chunk_size = self._tuner.token_budget, self._tuner.chunk_size
        return events
