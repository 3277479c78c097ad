"""Aim: the share of the TPOT target that steps are planned for, so that nine answers in ten keep it. Pure.

Predicted steps are means of what the device does. What an answer takes has more in it: the host between steps, prompts
that come together, company that is longer than the average. How much more, answers tell when they end, and so the aim
follows the 0.9 quantile of TPOT / target (Robbins and Monro, 1951): each late answer lowers it by 0.9 of a gain, each
other one raises it by 0.1, where the worker was as full as it may be: else it would have been in time whatever the aim.
The gain falls with the number that run: they all decoded under the aim of before, and end late together.
"""

_MAY_BE_LATE = 0.1  # of the answers
_GAIN = 0.2  # what as many answers as run together change, were all of them late
_FEW = 8  # running ones, whose ends say no more than those of so many
_FULL = 0.8  # of the cap
FIRST_AIM = 0.9
LEAST_AIM = 0.7


class Aim:
    def __init__(self, target_s: float | None):
        self._target_s = target_s
        self.share = FIRST_AIM if target_s is not None else 1.0

    def ended(self, tpot_s: float | None, num_running: int, cap: int) -> None:
        """An answer has ended, while so many run of those that may. None: it has one token and no TPOT."""
        if self._target_s is None or tpot_s is None:
            return
        is_late = tpot_s > self._target_s
        if is_late or num_running >= _FULL * cap:
            change = _GAIN / max(num_running, _FEW) * (_MAY_BE_LATE - is_late)
            self.share = min(max(self.share + change, LEAST_AIM), 1.0)
