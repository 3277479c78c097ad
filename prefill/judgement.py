"""Judgement: which of some settings would have served recent prompts best. Spread over many calls. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.step_cost import StepCost
from ..worker.tuning import LEAST_GAIN, in_ms
from .replay import ReplayRules, SeenPrompt, replay

_MORE_IN_TIME = 0.05  # of those in time: goodput is worth a move sooner than comfort is
_LEAST_FEWER = 0.01  # of the prompts; a smaller difference in how many are late is chance


@dataclass(frozen=True)
class Outcome:
    """What one setting would have given. Late are those over the target, and those that were given up."""

    rules: ReplayRules
    num_prompts: int
    num_late: int
    mean_s: float

    @property
    def rank(self) -> tuple[int, float]:
        """The lower the better."""
        return self.num_late, self.mean_s

    def gains_over(self, other: "Outcome") -> bool:
        """A tenth fewer are late, or some more in time; or none more are late and the mean is a tenth shorter."""
        fewer = other.num_late - self.num_late
        enough = min(LEAST_GAIN * other.num_late, _MORE_IN_TIME * (other.num_prompts - other.num_late))
        if fewer > 0 and fewer >= max(enough, _LEAST_FEWER * self.num_prompts):
            return True
        return fewer >= 0 and self.mean_s <= (1 - LEAST_GAIN) * other.mean_s


class Judgement:
    """Replays `prompts` behind `backlog` under each of `settings`, the first of which is the present one.

    Each replay takes a millisecond or so, which a worker should not spend all at once: `advance` does one or a few.
    """

    def __init__(
        self,
        prompts: Sequence[SeenPrompt],
        backlog: Sequence[SeenPrompt],
        cost: StepCost,
        target_s: float,
        settings: Sequence[ReplayRules],
    ):
        self._prompts = [*backlog, *prompts]
        self._num_backlog = len(backlog)
        self._cost = cost
        self._target_s = target_s
        self._settings = settings
        self._outcomes: list[Outcome] = []

    @property
    def num_settings(self) -> int:
        return len(self._settings)

    @property
    def is_done(self) -> bool:
        return len(self._outcomes) == len(self._settings)

    def advance(self, num_replays: int) -> None:
        done = len(self._outcomes)
        self._outcomes += [self._outcome(rules) for rules in self._settings[done : done + num_replays]]

    def better(self) -> tuple[ReplayRules, str] | None:
        """What gains enough over the present setting, and in which way; None: nothing does. All must be replayed."""
        present, best = self._outcomes[0], min(self._outcomes, key=lambda outcome: outcome.rank)
        return (best.rules, self._reason(present, best)) if best.gains_over(present) else None

    def _outcome(self, rules: ReplayRules) -> Outcome:
        ttfts = replay(self._prompts, self._cost, rules)[self._num_backlog :]
        num_late = sum(1 for ttft in ttfts if ttft > self._target_s)
        mean = sum(min(ttft, 2 * self._target_s) for ttft in ttfts) / len(ttfts)
        return Outcome(rules, len(ttfts), num_late, mean)

    def _reason(self, present: Outcome, best: Outcome) -> str:
        of_these = f"of the last {best.num_prompts} prompts"
        if best.num_late != present.num_late:
            target = in_ms(self._target_s)
            return f"{best.num_late} instead of {present.num_late} {of_these} would be over the {target} left for them"
        return f"the mean TTFT {of_these} would be {in_ms(best.mean_s)} instead of {in_ms(present.mean_s)}"
