"""StepShare: how much a prefill step may compute on a worker that decodes at the same time. Pure; sim/ drives the same.

A turn of the worker's loop gives each role one step, so what is generated here waits for the prefill step of its turn.
The decode role says with each of its plans how many prompt tokens a turn may hold:

    tokens of the prefill step = what a turn may hold - prompt tokens of decode's own step - base / per_prompt_token

The last term is what a step of its own costs beside its tokens; it counts where there is a target for the time per
token, from which the decode role's tuner has derived what a turn may hold.
"""

import math

from ..core.step_cost import StepCost

MIN_SHARE = 4  # the prefill role gets at least 1/4 of the prompt tokens of a turn: neither role starves the other


class StepShare:
    """One per worker. Without decodes a prefill step is as long as the prefill role likes."""

    def __init__(self, *, has_target: bool = False):
        self._has_target = has_target
        self._is_decoding = False
        self._left = self._least = 0

    def planned(self, num_decodes: int, prompt_budget: int, num_prompt_tokens: int) -> None:
        """A step of the decode role: so many decodes, beside which a turn may compute `prompt_budget` prompt tokens,
        and so many that it computes itself.
        """
        self._is_decoding = num_decodes > 0
        self._left, self._least = prompt_budget - num_prompt_tokens, max(prompt_budget // MIN_SHARE, 1)

    def limited(self, token_budget: int, cost: StepCost) -> int:
        """The most tokens of the next prefill step, of the `token_budget` it would have alone."""
        if not self._is_decoding:
            return token_budget
        own = 0
        if self._has_target and cost.knows_prompts and cost.per_prompt_token_s > 0:
            own = math.ceil(cost.base_s / cost.per_prompt_token_s)
        return min(token_budget, max(self._left - own, self._least))
