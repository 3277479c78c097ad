"""When a dead child comes back: pure, with the time passed in."""

from dataclasses import dataclass

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
STABLE_LIFE_S = 30.0  # a life this long forgets earlier deaths
MAX_DEATHS_BEFORE_READY = 3


@dataclass
class RestartPolicy:
    """One child's. Delays double from FIRST_DELAY_S to MAX_DELAY_S while lives are short.

    A child that was never ready and dies MAX_DEATHS_BEFORE_READY times in a row will not get better by itself.
    """

    started_at: float = 0.0
    was_ready: bool = False
    num_deaths: int = 0  # short lives in a row

    def on_start(self, now: float) -> None:
        self.started_at = now

    def on_ready(self) -> None:
        self.was_ready = True

    def on_death(self, now: float) -> float | None:
        """Seconds to wait before the next start; None: give up."""
        self.num_deaths = 1 if now - self.started_at >= STABLE_LIFE_S else self.num_deaths + 1
        if not self.was_ready and self.num_deaths >= MAX_DEATHS_BEFORE_READY:
            return None
        return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(self.num_deaths - 1, 16)))
