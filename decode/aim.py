"""Aim: the share of the TPOT target that steps are planned for, so that few answers miss it. Pure.

Predicted steps are means of what the device does. What an answer takes has more in it: the host between steps, prompts
that come together. But it also has times in it when the worker was less full than it may be, and steps were shorter.
What comes of both, answers tell when they end: the aim falls while more than a few of the last ones were late, and
rises while fewer were. It moves at ends on a full worker alone: else nobody waits, and another cap changes nothing.

Counted are all ends, not those of full moments: a worker that is full for seconds at a time has late answers then and
few in all, while who is kept waiting to spare them misses its TTFT for certain.
"""

_MAY_BE_LATE = 0.07  # of the answers
_GAIN = 0.2  # what as many ends as run together change, were all answers late
_LATE_ENDS = 64  # answers that the share of late ones is taken over
_FEW = 8  # running ones, whose ends say no more than those of so many
_FULL = 0.8  # of the cap
LEAST_AIM = 0.7
MOST_AIM = 1.2


class Aim:
    def __init__(self, target_s: float | None):
        self._target_s = target_s
        self._late = 0.0  # share of the answers
        self.share = 1.0

    def ended(self, tpot_s: float | None, num_running: int, cap: int) -> None:
        """An answer has ended, while so many run of those that may. None: it has one token and no TPOT."""
        if self._target_s is None or tpot_s is None:
            return
        self._late += ((tpot_s > self._target_s) - self._late) / _LATE_ENDS
        if num_running >= _FULL * cap:
            # They all decoded under the aim of before and end late together: so each changes it little.
            change = _GAIN / max(num_running, _FEW) * (_MAY_BE_LATE - self._late)
            self.share = min(max(self.share + change, LEAST_AIM), MOST_AIM)
